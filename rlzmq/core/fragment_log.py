"""FragmentLog: a file of records with checksums, which readers map into memory.

::

    magic      names the kind of the file and its version
    records    each: u32 CRC-32 of the rest, u8 kind, u64 length, payload

An incomplete record (after a kill or a power failure) or an altered one ends what can be read.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rlzmq.core import faults
from rlzmq.core.files import write_all

__all__ = ["RECORD_BYTES", "Record", "map_file", "read_records", "write_record"]

_RECORD = struct.Struct("<IBQ")
RECORD_BYTES = _RECORD.size
"""Size of a record without its payload."""


class Record(NamedTuple):
    """A record of a log: its kind and payload, and where it ends in the file."""

    kind: int
    payload: memoryview
    end: int


def write_record(file: BinaryIO, kind: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """Append one record whose payload is the concatenated `parts`, which are not copied."""
    length = sum(memoryview(part).nbytes for part in parts)
    crc = zlib.crc32(_RECORD.pack(0, kind, length)[4:])
    for part in parts:
        crc = zlib.crc32(part, crc)
    file.write(_RECORD.pack(crc, kind, length))
    faults.at("record.begun")
    for part in parts:
        write_all(file, part)


def map_file(path: Path) -> memoryview:
    """Return a file's content, memory-mapped."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_records(content: memoryview, start: int) -> Iterator[Record]:
    """Yield the records behind `start`, up to the first incomplete or altered one."""
    while start + _RECORD.size <= len(content):
        crc, kind, length = _RECORD.unpack_from(content, start)
        end = start + _RECORD.size + length
        if end > len(content) or zlib.crc32(content[start + 4 : end]) != crc:
            return
        yield Record(kind, content[start + _RECORD.size : end], end)
        start = end
