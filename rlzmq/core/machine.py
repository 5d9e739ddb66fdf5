"""The machine that this process runs on."""

from __future__ import annotations

from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """Return a text that only this machine has, and only until it starts again.

    Containers on one machine share it.

    Raises:
        OSError: The system has no such text (it is not Linux).
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
