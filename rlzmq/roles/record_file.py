"""Append-only files of checksummed records, in a directory that one run at a time may use.

A record::

    u32 CRC-32 of the rest, u8 kind, u64 length, payload

An incomplete record (after a kill or a power failure) ends its file.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rlzmq.core import faults
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import FileLock, lock_file, make_directories, write_all
from rlzmq.wire.codec import Buffer

__all__ = ["create_file", "lock_directory", "map_file", "read_records", "write_record"]

_HEAD = struct.Struct("<IBQ")
_MAX_RECORD_BYTES = 1 << 31


def lock_directory(directory: Path, setting: str) -> FileLock:
    """Create a directory for this user only, and lock it.

    Raises:
        ConfigurationError: The directory cannot be used, or another run uses it.
    """
    try:
        make_directories(directory, mode=0o700)
        return lock_file(directory / "lock")
    except BlockingIOError:
        raise ConfigurationError(
            f"config.{setting}={str(directory)!r} is in use by another run. Give each run its own directory."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"config.{setting}={str(directory)!r} cannot be used: {error}.") from None


def create_file(path: Path, *, is_new: bool = False) -> BinaryIO:
    """Open an empty file for records, unbuffered and for this user only.

    Raises:
        FileExistsError: The file exists and `is_new` is True.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else os.O_TRUNC)
    return os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)


def write_record(file: BinaryIO, kind: int, parts: Sequence[Buffer]) -> None:
    """Append one record whose payload is the concatenated `parts`, which are not copied."""
    length = sum(memoryview(part).nbytes for part in parts)
    crc = zlib.crc32(_HEAD.pack(0, kind, length)[4:])
    for part in parts:
        crc = zlib.crc32(part, crc)
    file.write(_HEAD.pack(crc, kind, length))
    faults.at("record.begun")
    for part in parts:
        write_all(file, part)


def map_file(path: Path) -> memoryview:
    """Return a file's content, memory-mapped."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_records(content: memoryview, position: int) -> Iterator[tuple[int, memoryview, int]]:
    """Yield (kind, payload, position of the next record) up to the first incomplete or damaged record."""
    while position + _HEAD.size <= len(content):
        crc, kind, length = _HEAD.unpack_from(content, position)
        end = position + _HEAD.size + length
        if length > _MAX_RECORD_BYTES or end > len(content):
            return
        if zlib.crc32(content[position + 4 : end]) != crc:
            return
        yield kind, content[position + _HEAD.size : end], end
        position = end
