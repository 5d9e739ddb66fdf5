"""One broker per run: a lock next to the run's join file, and the epoch that rises with each of its brokers."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.printable import printable

__all__ = ["RunLock"]


class RunLock:
    """``STEM.broker.lock``: held by the run's only broker; the system frees it when its process ends.

    It also remembers the epoch (the broker's incarnation): peers follow the highest, so that it must rise
    although the wall clock is set back, or the next broker runs on another machine.

    Attributes:
        incarnation: Of the broker that holds it, higher than that of all before it.
    """

    def __init__(self, fd: int, incarnation: int) -> None:
        self._fd = fd
        self.incarnation = incarnation

    @classmethod
    def take(cls, join_file: Path) -> RunLock:
        """The lock of the run with this join file.

        Raises:
            ConfigurationError: Another broker serves this run, or the file cannot be written.
        """
        path = join_file.absolute().with_name(f"{join_file.stem}.broker.lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = _words(fd)
            os.close(fd)
            who = f"process {text[1]} on {text[2]}" if len(text) == 3 else "another process"
            raise ConfigurationError(
                f"{who} is the broker of this run already ({path} is locked): end it first, or choose another "
                "--join-file for a run of its own"
            ) from None
        text = _words(fd)  # under the lock: another broker may have come and gone since the file was opened
        before = int(text[0]) if text and text[0].isdigit() else 0
        incarnation = max(before + 1, int(time.time() * 1000))
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{incarnation} {os.getpid()} {socket.gethostname()}\n".encode(), 0)
        os.fsync(fd)
        return cls(fd, incarnation)

    def release(self) -> None:
        """Let the next broker in; the file stays, for its epoch. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _words(fd: int) -> list[str]:
    """Epoch, pid and host of the newest broker, as it wrote them."""
    return printable(os.pread(fd, 512, 0).decode(errors="replace"), keep=" \n").split()
