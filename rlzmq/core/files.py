"""Files and directories that only their owner and, if the umask allows it, their group can write."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

from rlzmq.core.printable import printable

__all__ = ["lock_file", "make_directories", "opener", "sync_directory", "write_all", "write_text"]

# Maximum mode. The umask may remove permissions, but with a umask of 0 others still get none.
_FILE_MODE = 0o664
_DIRECTORY_MODE = 0o775


def opener(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=opener)``."""
    return os.open(path, flags, _FILE_MODE)


def write_text(path: Path, text: str) -> None:
    """Write a small UTF-8 file.

    Raises:
        OSError: It cannot be written; ``filename`` is its path.
    """
    try:
        with open(path, "w", encoding="utf-8", opener=opener) as file:
            file.write(text)
    except OSError as error:
        error.filename = str(path)  # a write to a full disk leaves it out
        raise


def make_directories(path: Path, *, mode: int = _DIRECTORY_MODE) -> None:
    """Create a directory with this mode, and its parents, if they are missing."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=mode if place == path else _DIRECTORY_MODE, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises an error if it is a file


def lock_file(path: Path, *, create: bool = True) -> int:
    """Lock a file of this user only, and return the descriptor that holds the lock until it is closed.

    The system closes it when the process ends. Who holds a lock may write a few words about itself into the file.

    Raises:
        BlockingIOError: It is locked; ``strerror`` is the first 512 bytes of its text.
        OSError: It cannot be opened, is a symbolic link, or its filesystem has no locks.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass  # its last holder removed the file between open and lock, so try again
        except BlockingIOError:
            text = printable(os.pread(fd, 512, 0).decode(errors="replace"), keep=" \n").strip()
            os.close(fd)
            raise BlockingIOError(errno.EAGAIN, text, str(path)) from None
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def write_all(file: Any, data: Any) -> None:
    """Write a buffer to an unbuffered file, in as many calls as it takes."""
    left = memoryview(data).cast("B")
    while left:
        left = left[file.write(left) :]


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
