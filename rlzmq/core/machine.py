"""The machine that this process runs on, and OpenedProcess: a process that keeps its identity when its number does not.

Numbers are used again soon (there are 32,768 by default), so a signal to a number may reach a process that has nothing
to do with the one that had it. This module is the only one that sends signals by number, except to children that this
process has not waited for: nobody else gets their numbers.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
from pathlib import Path
from typing import Self

__all__ = ["OpenedProcess", "boot_id", "num_usable_cores", "process_space", "start_mark"]


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
    num_cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return num_cores
    return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))


def start_mark(pid: int) -> str | None:
    """Return a text that only this process has among all that ever have its number; None if it does not exist.

    It contains the time of its start in hundredths of a second, within which no number comes round again.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 22 of proc_pid_stat(5), in clock ticks since the machine's start; the second may hold spaces.
    return f"{boot_id()} {status.rpartition(')')[2].split()[19]}"


class OpenedProcess:
    """A running process, whatever becomes of its number. A context manager.

    Args:
        pid: Its number.
        mark: Its `start_mark`, read when the number was known to be its own; None: the process that has the number now.

    Raises:
        ProcessLookupError: It has ended, even if another process has its number.
    """

    def __init__(self, pid: int, mark: str | None = None) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
            raise ProcessLookupError(f"{pid} is the number of a thread") from None
        # The mark is read after opening: if the number changes hands in between, the opened process has ended.
        if mark is not None and start_mark(pid) != mark:
            self.close()
            raise ProcessLookupError(f"the process with number {pid} has ended")

    def send_signal(self, number: int) -> None:
        """Send a signal to this process.

        Raises:
            ProcessLookupError: It has ended.
            PermissionError: It belongs to another user.
        """
        signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Release the process, which continues. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
