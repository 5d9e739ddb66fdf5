"""Messages whose large frames stay in shared memory: the message that is sent names their place instead.

```
sender:    [header][column…]  ─fold─►  [place in memory][header][frames outside of the memory…]
receiver:  [header][column…]  ◄─unfold─
```

Only connections between processes of one host (ipc) fold, and only they unfold. Whether the receiver can open the
memory shows when it does. If it cannot, the message is lost, which every protocol here expects, and the receiver
answers that it needs frames: from then on it gets them.

A received segment is held before the role sees the message. So a fragment that a broker has accepted survives
the death of its runner, and a shard that a learner has decoded that of the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from rlzmq.net.shared_memory import Segment, min_shared_bytes, read_segment
from rlzmq.wire.codec import WIRE_VERSION, Buffer, decode_head, encode_opaque
from rlzmq.wire.errors import SchemaError, WireError, wire_decoder
from rlzmq.wire.schema import FOLDED, FRAMES_NEEDED, from_header, to_header

__all__ = ["FOLDED_TOPIC", "SharedFrames"]

FOLDED_TOPIC = bytes((WIRE_VERSION, FOLDED))
"""Prefix of folded messages, which a SUB socket subscribes to."""

# Each takes two descriptors. What a process holds beyond that is copied.
_MAX_HELD = 256
_OUTSIDE = -1


@dataclass(frozen=True, slots=True)
class _Folded:
    """Header of a folded message; its payload is the first frame of the message, then its frames outside of the memory.

    Attributes:
        pid, fd, nonce, num_bytes: See `Segment.hold`.
        offsets, lengths: Of each frame after the first, its place in the segment; offset -1: it is outside.
    """

    pid: int
    fd: int
    nonce: str
    num_bytes: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _FramesNeeded:
    """The answer to a folded message whose segment cannot be opened.

    Attributes:
        nonce: The segment's.
        reason: Why.
    """

    nonce: str
    reason: str


class SharedFrames:
    """Folds and unfolds the messages of one socket.

    Args:
        answer: ``answer(peer, frames)`` sends a message's frames to a peer.
        on_frames_needed: ``on_frames_needed(peer, reason)``, called once per peer that has answered that it needs
            frames.
    """

    def __init__(
        self,
        answer: Callable[[bytes, list[Buffer]], object],
        on_frames_needed: Callable[[bytes, str], object],
    ) -> None:
        self._min_bytes = min_shared_bytes()
        self._answer = answer
        self._on_frames_needed = on_frames_needed
        self._in_need: set[bytes] = set()
        self._sent: WeakValueDictionary[str, Segment] = WeakValueDictionary()
        self._held: WeakValueDictionary[str, Segment] = WeakValueDictionary()

    def fold(self, peer: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the message to send: folded if large frames are in a segment, else unchanged.

        The sender must keep the message until the receiver has acknowledged it.

        Args:
            peer: The receiver; b"" on a socket with one peer, or for all subscribers, which all get frames as soon as
                any peer needs them.
            frames: Frames of the message.
        """
        segment = None
        for frame in frames:
            if type(frame) is not bytes and (segment := _segment_of(frame)) is not None:
                break
        if segment is None or peer in self._in_need:
            return frames
        offsets, lengths, outside = [], [], [frames[0]]
        for frame in frames[1:]:
            if _segment_of(frame) is segment:
                view = np.frombuffer(frame, np.uint8)
                offsets.append(int(view.__array_interface__["data"][0]) - segment.address)
                lengths.append(view.size)
            else:
                offsets.append(_OUTSIDE)
                lengths.append(0)
                outside.append(frame)
        if sum(lengths) < self._min_bytes:
            return frames
        self._sent[segment.nonce] = segment
        header = _Folded(segment.pid, segment.fd, segment.nonce, len(segment), tuple(offsets), tuple(lengths))
        return encode_opaque(FOLDED, to_header(header), outside)

    def unfold(self, peer: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Return a received message as it was before `fold`; a malformed one unchanged, for its receiver to refuse.

        Args:
            peer: The sender; b"" on a socket with one peer.
            frames: Frames of the message.

        Returns:
            None if there is nothing for the role: the message is lost, or it was an answer.
        """
        kind = frames[0][1] if frames and len(frames[0]) > 1 else 0
        if kind != FOLDED and kind != FRAMES_NEEDED:
            return frames
        try:
            header = _decode(kind, frames)
        except WireError:
            return frames
        if isinstance(header, _FramesNeeded):
            self._note_need(peer, header)
            return None
        try:
            return self._open(header, frames)
        except OSError as error:
            needed = _FramesNeeded(header.nonce, f"{type(error).__name__}: {error.strerror or error}")
            self._answer(peer, encode_opaque(FRAMES_NEEDED, to_header(needed)))
            return None

    def _open(self, folded: _Folded, frames: Sequence[Buffer]) -> list[Buffer]:
        place = (folded.pid, folded.fd, folded.nonce, folded.num_bytes)
        memory: Segment | bytearray
        if len(self._held) < _MAX_HELD:
            memory = self._held[folded.nonce] = Segment.hold(*place)
        else:
            memory = read_segment(*place)
        view, outside = memoryview(memory), iter(frames[2:])
        unfolded = [frames[1]]
        for offset, length in zip(folded.offsets, folded.lengths, strict=True):
            unfolded.append(next(outside) if offset == _OUTSIDE else view[offset : offset + length])
        return unfolded

    def _note_need(self, peer: bytes, needed: _FramesNeeded) -> None:
        if peer in self._in_need or needed.nonce not in self._sent:
            return  # an old message, which nobody needs any more
        self._in_need |= {peer, b""}
        self._on_frames_needed(peer, needed.reason)


@wire_decoder
def _decode(kind: int, frames: Sequence[Buffer]) -> _Folded | _FramesNeeded:
    """Return the checked header of a message of one of the two kinds.

    Raises:
        WireError: It is malformed, or names frames outside of the segment.
    """
    header = decode_head(frames).header
    if kind == FRAMES_NEEDED:
        return from_header(_FramesNeeded, header)
    folded = from_header(_Folded, header)
    if folded.pid < 1 or folded.fd < 0 or len(frames) != folded.offsets.count(_OUTSIDE) + 2:
        raise SchemaError(
            "a folded message has a process, a descriptor, and the frames outside of its segment"
        )
    for offset, length in zip(folded.offsets, folded.lengths, strict=True):
        if offset != _OUTSIDE and not 0 <= offset < offset + length <= folded.num_bytes:
            raise SchemaError(
                f"a folded frame of {length} bytes from {offset} in a segment of {folded.num_bytes}"
            )
    return folded


def _segment_of(frame: Buffer) -> Segment | None:
    """Return the segment that a frame, an array or a view of either is in."""
    owner = frame
    while not isinstance(owner, Segment):
        if isinstance(owner, memoryview):
            owner = owner.obj
        elif isinstance(owner, np.ndarray):
            owner = owner.base
        else:
            return None
    return owner
