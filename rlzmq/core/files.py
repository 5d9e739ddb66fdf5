"""Files and directories that only their owner and, if the umask allows it, their group can write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["make_directories", "opener", "sync_directory", "write_all", "write_text"]

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
