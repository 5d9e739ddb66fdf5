"""Encoding of fragment ranges and blobs as two payload frames, and of sequence numbers as spans.

The lists grow with the number of runners, so they are not in a header.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rlzmq.core.printable import printable
from rlzmq.wire.codec import Buffer
from rlzmq.wire.errors import ArrayMismatchError, BoundExceededError, MalformedFrameError, wire_decoder
from rlzmq.wire.schema import FragmentId

__all__ = ["FragmentRange", "pack_blobs", "pack_ranges", "to_spans", "unpack_blobs", "unpack_ranges"]

# A range takes 40 bytes. No update has a million of them.
_MAX_RANGES = 1_000_000


class FragmentRange(NamedTuple):
    """Env steps ``first … first + num_steps - 1`` of one fragment."""

    fragment: FragmentId
    first: int
    num_steps: int


def pack_ranges(ranges: Iterable[FragmentRange]) -> list[Buffer]:
    """Return two frames: runner uuids joined by newlines, and ``<i8 [n, 5]``."""
    runners: dict[str, int] = {}
    rows = [
        (runners.setdefault(fragment.runner, len(runners)), fragment.incarnation, fragment.seq, first, num)
        for fragment, first, num in ranges
    ]
    table = np.array(rows, dtype="<i8").reshape(len(rows), 5)
    return ["\n".join(runners).encode(), table.tobytes()]


@wire_decoder
def unpack_ranges(frames: Sequence[Buffer]) -> list[FragmentRange]:
    """Return the ranges from frames of `pack_ranges`.

    Raises:
        WireError: The frames are malformed, or contain an impossible index or number.
    """
    if len(frames) != 2:
        raise MalformedFrameError(f"ranges come in 2 frames, got {len(frames)}")
    names, raw = memoryview(frames[0]).cast("B"), memoryview(frames[1]).cast("B")
    if len(raw) % 40:
        raise ArrayMismatchError(f"a table of ranges has 40 bytes per row, got {len(raw)} bytes")
    if len(raw) // 40 > _MAX_RANGES:
        raise BoundExceededError(f"at most {_MAX_RANGES} ranges, got {len(raw) // 40}")
    if not len(raw):
        return []
    try:
        runners = [printable(name) for name in bytes(names).decode().split("\n")]
    except UnicodeDecodeError:
        raise MalformedFrameError("runner names are UTF-8") from None
    table = np.frombuffer(raw, dtype="<i8").reshape(-1, 5)
    if table.min() < 0 or int(table[:, 0].max()) >= len(runners):
        raise MalformedFrameError("a table of ranges has a negative number or an unknown runner")
    return [
        FragmentRange(FragmentId(runners[index], incarnation, seq), first, num_steps)
        for index, incarnation, seq, first, num_steps in table.tolist()
    ]


def pack_blobs(blobs: Iterable[Buffer]) -> list[Buffer]:
    """Return two frames: ``<i8`` lengths, and the concatenated blobs."""
    parts = [bytes(memoryview(blob).cast("B")) for blob in blobs]
    return [np.array([len(part) for part in parts], dtype="<i8").tobytes(), b"".join(parts)]


@wire_decoder
def unpack_blobs(frames: Sequence[Buffer]) -> list[memoryview]:
    """Return the blobs from frames of `pack_blobs`, as views.

    Raises:
        WireError: The frames are malformed, or the lengths do not match.
    """
    if len(frames) != 2:
        raise MalformedFrameError(f"blobs come in 2 frames, got {len(frames)}")
    raw, body = memoryview(frames[0]).cast("B"), memoryview(frames[1]).cast("B")
    if len(raw) % 8 or len(raw) // 8 > _MAX_RANGES:
        raise MalformedFrameError(f"blob lengths have 8 bytes each, got {len(raw)} bytes")
    lengths = np.frombuffer(raw, dtype="<i8").tolist() if len(raw) else []
    if any(length < 0 for length in lengths) or sum(lengths) != len(body):
        raise ArrayMismatchError(f"blobs of {sum(lengths)} bytes came in {len(body)} bytes")
    blobs, offset = [], 0
    for length in lengths:
        blobs.append(body[offset : offset + length])
        offset += length
    return blobs


def to_spans(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as sorted spans ``(first, last)``, both included: 1 2 3 7 → ((1, 3), (7, 7))."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return tuple(spans)
