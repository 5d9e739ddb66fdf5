"""The lock that allows one broker per run, next to the run's join file, and the broker's incarnation."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import lock_file

__all__ = ["RunLock"]


class RunLock:
    """``STEM.broker.lock``, held by the run's only broker; the system frees it when the process ends.

    The file also stores the broker's incarnation. Peers follow the highest one, so it must increase even if the
    wall clock is set back or the next broker runs on another machine.

    Attributes:
        incarnation: Incarnation of the broker that holds the lock, higher than all before it.
    """

    def __init__(self, fd: int, incarnation: int) -> None:
        self._fd = fd
        self.incarnation = incarnation

    @classmethod
    def take(cls, join_file: Path) -> RunLock:
        """Take the lock of the run with this join file.

        Raises:
            ConfigurationError: Another broker serves this run, or the file cannot be written.
        """
        path = join_file.absolute().with_name(f"{join_file.stem}.broker.lock")
        try:
            fd = lock_file(path)
        except BlockingIOError as error:
            text = (error.strerror or "").split()  # incarnation, pid and host that the newest broker wrote
            who = f"process {text[1]} on {text[2]}" if len(text) == 3 else "another process"
            raise ConfigurationError(
                f"{who} is already the broker of this run ({path} is locked): end it first, or choose another "
                "--join-file for another run"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
        before, *_ = os.pread(fd, 32, 0).split() or [b""]
        incarnation = max(int(before) + 1 if before.isdigit() else 1, int(time.time() * 1000))
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{incarnation} {os.getpid()} {socket.gethostname()}\n".encode(), 0)
        os.fsync(fd)
        return cls(fd, incarnation)

    def release(self) -> None:
        """Release the lock; the file stays, for its incarnation. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
