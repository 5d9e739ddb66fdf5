"""Packed frames: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.net.socket import (
    MAX_PACKED_BYTES,
    MAX_PACKED_FRAMES,
    PACKED,
    PART,
    PART_BYTES,
    SMALL_BYTES,
    PartialMessages,
    pack_frames,
    parts_of,
    sizes_of,
    unpack_frames,
)
from rlzmq.wire.codec import MAX_ARRAYS, BoundExceededError, MalformedFrameError

_sizes = st.one_of(st.integers(0, 50), st.sampled_from([SMALL_BYTES - 1, SMALL_BYTES, 3 * SMALL_BYTES]))
_messages = st.lists(st.lists(_sizes.map(lambda size: bytes([size % 251]) * size), min_size=1), min_size=1)
OUTSIDE = 2**32 - 1
_MAX = 4 + 8 * MAX_PACKED_FRAMES + MAX_PACKED_BYTES


def pack(*messages: list[Any]) -> list[Any]:
    return pack_frames([(frames, sizes_of(frames)) for frames in messages])


def table(*entries: int, body: bytes = b"", num: int | None = None) -> bytes:
    """A first frame with these entries."""
    num = len(entries) if num is None else num
    return PACKED + struct.pack(f"<H{len(entries)}I", num, *entries) + body


@given(_messages)
def test_every_message_comes_back_as_it_was(messages: list[list[bytes]]) -> None:
    assert unpack_frames(pack(*messages)) == messages


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([PACKED + b"\0"], "got 3"),
        ([table(1, 4, num=3, body=b"abc")], "3 packed frames and messages in 15 bytes"),
        ([table(0)], "0 frames, 0 are declared"),
        ([table(2, 1, body=b"a")], "2 frames, 1 are declared"),
        ([table(1, 1, body=b"ab")], "do not fill"),
        ([table(1, OUTSIDE), b"a", b"b"], "do not fill"),
        ([table(1, _MAX - 11, body=bytes(_MAX - 11))], f"at most {_MAX} bytes"),
        ([], "cannot be decoded"),
    ],
)
def test_what_was_not_packed_is_refused(frames: list[bytes], says: str) -> None:
    with pytest.raises(MalformedFrameError, match=says):
        unpack_frames(frames)


_large = st.sampled_from([0, 1, SMALL_BYTES, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
_whole = st.lists(_large.map(lambda size: bytes([size % 251]) * size), min_size=1, max_size=4)


def together(parts: list[list[Any]], partial: PartialMessages) -> list[bytes] | None:
    """Give all parts; return the message that the last one completes."""
    done = [partial.add(b"peer", [bytes(part[0]), memoryview(bytes(part[1]))]) for part in parts]
    assert not any(done[:-1])
    return None if done[-1] is None else [bytes(frame) for frame in done[-1]]


@given(_whole)
def test_a_message_in_parts_comes_out_whole(frames: list[bytes]) -> None:
    partial = PartialMessages(1 << 22, 1 << 22)
    parts = parts_of(frames, 2**32 + 5)
    assert all(len(part[1]) <= PART_BYTES for part in parts)
    assert together(parts, partial) == frames
    assert partial.num_bytes == 0


@given(_whole.filter(lambda frames: len(frames) > 1), st.data())
def test_a_message_of_which_a_part_was_lost_is_lost_and_the_next_is_not(
    frames: list[bytes], data: Any
) -> None:
    partial = PartialMessages(1 << 22, 1 << 22)
    parts = parts_of(frames, 1)
    del parts[data.draw(st.integers(0, len(parts) - 1))]
    assert together(parts, partial) is None
    assert together(parts_of(frames, 2), partial) == frames


def test_unfinished_messages_are_bounded_one_by_one_and_together() -> None:
    partial = PartialMessages(4 * PART_BYTES, 6 * PART_BYTES)
    unfinished = parts_of([bytes(9 * PART_BYTES)], 1)
    for part in unfinished[:3]:
        assert partial.add(b"first", part) is None
    with pytest.raises(BoundExceededError):
        together(unfinished, partial)
    for part in unfinished[:3]:
        partial.add(b"second", part)
    assert partial.num_bytes <= 6 * PART_BYTES
    for peer in (b"first", b"second"):
        partial.forget(peer)
    assert partial.num_bytes == 0
    empty = parts_of([b""] * (MAX_ARRAYS + 9), 1)
    with pytest.raises(BoundExceededError):
        together(empty, partial)


@pytest.mark.parametrize("frames", [[PART], [PART + bytes(9)], [PART + bytes(3), b""], [PART + bytes(9)] * 3])
def test_what_is_no_part_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedFrameError):
        PartialMessages(10, 10).add(b"peer", frames)
