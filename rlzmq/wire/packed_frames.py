"""Small frames of one or several messages as one frame, and large messages as parts.

A zmq message costs at each socket that it passes, and so does each of its frames: more than copying a few kilobytes.

```
frame 0:  [PACKED: 2 bytes][number n: 2 bytes][n entries: 4 bytes each][the small frames, one after the other]
frame 1…: the other frames, in order
entries, for each message: its number of frames, and each frame's length, or OUTSIDE
```

Both ends of a connection must be of the same release: no wire version (`rlzmq.wire.codec`) begins with this byte.

libzmq hands over whole messages only, and bounds neither their frames nor their sum. So a message over TCP that has
more than one frame, or a large one, travels as several, which the receiver can count and refuse one by one:

```
frame 0:  [PART: 2 bytes][message: 4 bytes][part: 4 bytes][last of its frame: 1 bit, last of its message: 1 bit]
frame 1:  at most PART_BYTES of one of the message's frames
```
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlzmq.wire.codec import MAX_ARRAYS, BoundExceededError, Buffer, MalformedFrameError, wire_decoder

__all__ = [
    "MAX_PACKED_BYTES",
    "MAX_PACKED_FRAMES",
    "PACKED",
    "PART",
    "PART_BYTES",
    "SMALL_BYTES",
    "PartialMessages",
    "pack_frames",
    "parts_of",
    "sizes_of",
    "unpack_frames",
]

PACKED = b"\xf1\0"
SMALL_BYTES = 8192
"""Below this size frames are packed. Receivers copy frames of this size anyway, see `rlzmq.net.events`."""

MAX_PACKED_BYTES = 64 * 1024
"""Bytes of small frames that are packed; later ones are not."""

MAX_PACKED_FRAMES = 2 * (MAX_ARRAYS + 2)
"""Frames of all messages together; a message of the codec has at most half as many."""

PART = b"\xf2\0"
PART_BYTES = 256 * 1024
"""Data of a part. Encrypting it takes ten times as long as passing one more message to libzmq."""

_PART_HEAD = struct.Struct("<2sIIB")
_ENDS_FRAME, _ENDS_MESSAGE = 1, 2
_PART_COST_BYTES = 256  # of an unfinished message, beside its data

_OUTSIDE = 2**32 - 1
_HEAD = struct.Struct("<2sH")
_MAX_BYTES = _HEAD.size + 8 * MAX_PACKED_FRAMES + MAX_PACKED_BYTES


def sizes_of(frames: Iterable[Buffer]) -> list[int]:
    """Return the bytes of each frame."""
    return [len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in frames]


def pack_frames(messages: Iterable[tuple[Sequence[Buffer], Sequence[int]]]) -> list[Buffer]:
    """Return the frames of one message that contains all of these.

    Args:
        messages: The frames of each and `sizes_of` them; at least one message, `MAX_PACKED_FRAMES` frames in all.
    """
    entries: list[int] = []
    small: list[Buffer] = [b"", b""]
    packed: list[Buffer] = [b""]
    num_bytes = 0
    for frames, sizes in messages:
        entries.append(len(frames))
        if max(sizes) < SMALL_BYTES and num_bytes + sum(sizes) <= MAX_PACKED_BYTES:
            num_bytes += sum(sizes)
            entries += sizes
            small += frames
            continue
        for frame, size in zip(frames, sizes, strict=True):
            if size < SMALL_BYTES and num_bytes + size <= MAX_PACKED_BYTES:
                num_bytes += size
                entries.append(size)
                small.append(frame)
            else:
                entries.append(_OUTSIDE)
                packed.append(frame)
    small[0] = _HEAD.pack(PACKED, len(entries))
    small[1] = struct.pack(f"<{len(entries)}I", *entries)
    packed[0] = b"".join(small)
    return packed


@wire_decoder
def unpack_frames(frames: Sequence[Buffer]) -> list[list[Buffer]]:
    """Return the messages from a result of `pack_frames`; small frames are bytes.

    Raises:
        WireError: The frames are not such a result.
    """
    if not _HEAD.size <= len(frames[0]) <= _MAX_BYTES:
        raise MalformedFrameError(f"packed frames have at most {_MAX_BYTES} bytes, got {len(frames[0])}")
    body = bytes(frames[0])
    num = _HEAD.unpack_from(body)[1]
    end = _HEAD.size + 4 * num
    if len(body) < end:
        raise MalformedFrameError(f"a table of {num} packed frames and messages in {len(body)} bytes")
    entries = struct.unpack_from(f"<{num}I", body, _HEAD.size)
    messages: list[list[Buffer]] = []
    place, outside = 0, 1
    while place < num:
        sizes = entries[place + 1 : place + 1 + entries[place]]
        if not sizes or len(sizes) < entries[place]:
            raise MalformedFrameError(
                f"a packed message of {entries[place]} frames, {len(sizes)} are declared"
            )
        place += 1 + len(sizes)
        message: list[Buffer] = []
        for size in sizes:
            if size == _OUTSIDE:
                message += frames[outside : outside + 1]
                outside += 1
            else:
                begin, end = end, end + size
                message.append(body[begin:end])
        messages.append(message)
    if not messages or end != len(body) or outside != len(frames):
        raise MalformedFrameError("packed messages do not fill their frames")
    return messages


def parts_of(frames: Sequence[Buffer], number: int) -> list[list[Buffer]]:
    """Return the messages of two frames in which a message travels; the data is not copied.

    Args:
        frames: The message.
        number: Distinguishes the messages of one sender.
    """
    parts: list[list[Buffer]] = []
    for place, frame in enumerate(frames):
        num_bytes = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        data = np.frombuffer(frame, np.uint8) if num_bytes > PART_BYTES else frame
        for begin in range(0, max(num_bytes, 1), PART_BYTES):
            ends = _ENDS_FRAME if begin + PART_BYTES >= num_bytes else 0
            if ends and place == len(frames) - 1:
                ends |= _ENDS_MESSAGE
            head = _PART_HEAD.pack(PART, number & 0xFFFFFFFF, len(parts), ends)
            parts.append([head, data if num_bytes <= PART_BYTES else data[begin : begin + PART_BYTES]])
    return parts


@dataclass(slots=True)
class _Partial:
    """A message of which some parts have arrived."""

    number: int
    num_parts: int = 0
    num_bytes: int = 0
    frames: list[Buffer] = field(default_factory=list)
    pieces: list[Buffer] = field(default_factory=list)


class PartialMessages:
    """Puts the parts of messages together, for the peers of one socket.

    A message of which a part was lost with its connection is lost as a whole.

    Args:
        max_message_bytes: Bound of one message.
        max_all_bytes: Bound of all unfinished messages; beyond it, the largest is dropped.
    """

    def __init__(self, max_message_bytes: int, max_all_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_all_bytes = max_all_bytes
        self._partial: dict[bytes, _Partial] = {}
        self.num_bytes: int = 0

    @wire_decoder
    def add(self, peer: bytes, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Return the message that a part completes, or None.

        Raises:
            MalformedFrameError: It is not a part.
            BoundExceededError: The message is too large. It is dropped.
        """
        if len(frames) != 2 or len(frames[0]) != _PART_HEAD.size:
            raise MalformedFrameError(f"a part of a message has 2 frames, got {len(frames)}")
        _, number, index, ends = _PART_HEAD.unpack(frames[0])
        if index == 0:
            self.forget(peer)
            self._partial[peer] = _Partial(number)
        partial = self._partial.get(peer)
        if partial is None or (partial.number, partial.num_parts) != (number, index):
            self.forget(peer)
            return None
        data = frames[1]
        partial.num_parts += 1
        partial.num_bytes += len(data) + _PART_COST_BYTES
        self.num_bytes += len(data) + _PART_COST_BYTES
        partial.pieces.append(data)
        if ends & _ENDS_FRAME:
            pieces, partial.pieces = partial.pieces, []
            partial.frames.append(pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces)))
        if ends & _ENDS_MESSAGE:
            self.forget(peer)
            return partial.frames
        if partial.num_bytes > self._max_message_bytes or len(partial.frames) > MAX_ARRAYS + 2:
            self.forget(peer)
            raise BoundExceededError(
                f"a message has at most {self._max_message_bytes} bytes in {MAX_ARRAYS + 2} frames"
            )
        if self.num_bytes > self._max_all_bytes:
            self.forget(max(self._partial, key=lambda other: self._partial[other].num_bytes))
        return None

    def forget(self, peer: bytes) -> None:
        """Drop a peer's unfinished message."""
        partial = self._partial.pop(peer, None)
        if partial is not None:
            self.num_bytes -= partial.num_bytes
