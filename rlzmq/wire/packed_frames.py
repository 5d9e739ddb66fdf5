"""Small frames of one or several messages as one frame.

A zmq message costs at each socket that it passes, and so does each of its frames: more than copying a few kilobytes.

```
frame 0:  [PACKED: 2 bytes][number n: 2 bytes][n entries: 4 bytes each][the small frames, one after the other]
frame 1…: the other frames, in order
entries, for each message: its number of frames, and each frame's length, or OUTSIDE
```

Both ends of a connection must be of the same release: no wire version (`rlzmq.wire.codec`) begins with this byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from rlzmq.wire.codec import MAX_ARRAYS, Buffer
from rlzmq.wire.errors import MalformedFrameError, wire_decoder

__all__ = [
    "MAX_PACKED_BYTES",
    "MAX_PACKED_FRAMES",
    "PACKED",
    "SMALL_BYTES",
    "pack_frames",
    "sizes_of",
    "unpack_frames",
]

PACKED = b"\xf1\0"
SMALL_BYTES = 8192
"""Below this size frames are packed. Receivers copy frames of this size anyway, see `rlzmq.net.edge_reader`."""

MAX_PACKED_BYTES = 64 * 1024
"""Bytes of small frames that are packed; later ones are not."""

MAX_PACKED_FRAMES = 2 * (MAX_ARRAYS + 2)
"""Frames of all messages together; a message of the codec has at most half as many."""

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
