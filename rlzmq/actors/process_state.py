"""The state of a process, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_stopped"]


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (a debugger's stop does not count)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
