"""What a supervisor wants to know of a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlzmq.actors.exit_status import ActorLostError

__all__ = ["is_stopped", "lost_error"]


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal (a debugger's stop does not count)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def lost_error(handle: Any) -> ActorLostError:
    """The error for an actor that has ended although nobody asked it to."""
    status = handle.exited.result()
    text = f"{handle.name} (pid {handle.pid}) {status}."
    if status.stderr_lines:
        text += "\nIts last stderr lines:\n" + "\n".join(f"  {line}" for line in status.stderr_lines)
    return ActorLostError(text, role=handle.name, pid=handle.pid, exit_status=status)
