"""OpenedProcess: a process that stays the same one when the system gives its number to another process.

Numbers are used again soon (there are 32,768 by default), so a signal to a number may reach a process that has nothing
to do with the one that had it. This module is the only one that sends signals by number, except to children that this
process has not waited for: nobody else gets their numbers.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Self

from rlzmq.core.machine import boot_id

__all__ = ["OpenedProcess", "start_mark"]


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
