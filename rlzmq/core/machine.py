"""The machine that this process runs on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

__all__ = ["boot_id", "loopback_interface", "num_usable_cores", "process_space"]


def boot_id() -> str:
    """Return a text that only this machine has, and only until it starts again.

    Containers on one machine share it.

    Raises:
        OSError: The system has no such text (it is not Linux).
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_space() -> str:
    """Return an id of this machine and its process namespace; containers on one machine have different ids."""
    try:
        return f"{boot_id()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def num_usable_cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity, and its cgroup's quota (version 2)."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    num_cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return num_cores
    return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"
