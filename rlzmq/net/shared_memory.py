"""Segments: shared memory through which large arrays pass between processes of one host.

The process that fills a segment creates it as an anonymous file (memfd) and keeps it for further arrays. Another
process opens it by ``/proc/PID/fd/N``, which only processes of the same user can do, and holds it as long as any view
of it is left. Nothing has a name in a file system, so nothing remains once the last holder has ended, however it ended;
the limit of ``/dev/shm`` does not apply.

Who holds a segment is known to the kernel: a holder has a read lock on it, which ends with the holder. Before filling a
segment again, its owner must get the write lock, so arrays never change while anyone holds them. Every filling has
a random nonce at the segment's beginning: a holder that comes too late finds another one, or the write lock.

Forked children inherit the mappings, so that in them, too, collecting a segment unmaps its own memory and no other.

A segment cannot shrink (``F_SEAL_SHRINK``, checked by every holder), so reading it cannot fail with SIGBUS. Holders map
it copy-on-write: what they write is theirs alone, as with received frames.

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

import contextlib
import errno
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from rlzmq.wire.codec import (
    FOLDED,
    FRAMES_NEEDED,
    WIRE_VERSION,
    Buffer,
    SchemaError,
    WireError,
    decode_head,
    encode_opaque,
    from_header,
    to_header,
    wire_decoder,
)

__all__ = ["FOLDED_TOPIC", "MIN_SHARED_BYTES", "Segment", "SegmentPool", "SharedFrames"]


with contextlib.suppress(ModuleNotFoundError):  # runs in several processes need it, clients do not
    import fcntl


MIN_SHARED_BYTES = 1 << 18
"""Bytes of a message's arrays from which sharing them is cheaper than copying them through a socket."""

_NONCE_BYTES = 16
_ALIGNMENT_BYTES = 64  # of each array; the nonce has the first such line
_SIZE_STEP_BYTES = 1 << 18  # sizes are rounded up to this, so that a segment fits arrays of similar size
# Enough for what a runner may have under way. Of more, the least recently used is left to its holders.
_MAX_OWNED = 64
# A free segment that so many others were filled after is not needed any more.
_MAX_IDLE_FILLINGS = 64

_log = logging.getLogger("rlzmq")


def min_shared_bytes() -> int:
    """Return the number of bytes from which arrays are shared: the constant, or ``RLZMQ_MIN_SHARED_BYTES``.

    With the variable, tests make small fragments use shared memory (1), or large ones sockets.
    """
    return int(os.environ.get("RLZMQ_MIN_SHARED_BYTES", MIN_SHARED_BYTES))


class Segment(mmap.mmap):
    """One filling of a segment, mapped and held. It is released when neither it nor a view of it is left.

    Attributes:
        pid, fd: This process, and the segment's descriptor in it, by which other processes can open it.
        nonce: Hexadecimal nonce of the filling.
        address: Where it is mapped.
    """

    pid: int = 0
    fd: int = -1
    nonce: str = ""
    address: int = 0

    @classmethod
    def hold(cls, pid: int, fd: int, nonce: str, num_bytes: int) -> Segment:
        """Map and hold a filling of a segment.

        Args:
            pid, fd: A process that holds or owns it, and its descriptor there.
            nonce: The filling's nonce.
            num_bytes: Length of the filling, nonce included.

        Raises:
            OSError: It cannot be opened, is no segment, or has been filled again.
        """
        own = _open_filling(pid, fd, nonce, num_bytes)
        try:
            segment = cls(own, num_bytes, access=mmap.ACCESS_COPY)
        except BaseException:
            os.close(own)
            raise
        segment.pid, segment.fd, segment.nonce = os.getpid(), own, nonce
        segment.address = _address(segment)
        return segment

    def __del__(self) -> None:
        # In a forked child the lock is that of its parent, and the descriptor may have become another file's.
        if self.fd >= 0 and os.getpid() == self.pid:
            _lock(self.fd, fcntl.F_UNLCK)
            os.close(self.fd)


@dataclass(slots=True)
class _Owned:
    """A segment of this process: its descriptor, and its memory to write to."""

    fd: int
    memory: npt.NDArray[np.uint8]
    filled_at: int = 0
    pid: int = field(default_factory=os.getpid)

    def __del__(self) -> None:
        if os.getpid() == self.pid:  # not in a forked child
            os.close(self.fd)


class SegmentPool:
    """The segments that one thread fills, again and again.

    New memory costs more than copying through a socket does, because the system has to clear each of its pages, so
    segments are kept.
    """

    def __init__(self) -> None:
        self._min_bytes = min_shared_bytes()
        self._owned: list[_Owned] = []
        self._num_fillings = 0
        self._is_off = False

    def put(self, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Copy arrays into a segment that nobody holds.

        Returns:
            Equal arrays in the segment, which is held as long as one of them is left. The same arrays if they have
            fewer bytes than `min_shared_bytes`, or there is no shared memory; the first such failure is logged.
        """
        is_small = sum(array.nbytes for array in arrays) < self._min_bytes
        if self._is_off or is_small or any(array.dtype.hasobject for array in arrays):
            return list(arrays)
        num_bytes, places = _ALIGNMENT_BYTES, []
        for array in arrays:
            places.append(num_bytes)
            num_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

        def copy(memory: npt.NDArray[np.uint8]) -> None:
            for place, array in zip(places, arrays, strict=True):
                room = memory[place : place + array.nbytes].view(array.dtype).reshape(array.shape)
                np.copyto(room, array)

        flat = self._filled(num_bytes, copy)
        if flat is None:
            return list(arrays)
        return [
            flat[place : place + array.nbytes].view(array.dtype).reshape(array.shape) if array.size else array
            for place, array in zip(places, arrays, strict=True)
        ]

    def make(
        self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]
    ) -> npt.NDArray[np.uint8] | None:
        """Return an array in a segment that nobody held; None where `put` would return its arrays.

        Args:
            num_bytes: Its size.
            fill: Called with the array ``uint8[num_bytes]`` to write its content into, at a multiple of 64 bytes.
        """
        if self._is_off or num_bytes < self._min_bytes:
            return None
        flat = self._filled(_ALIGNMENT_BYTES + num_bytes, lambda memory: fill(memory[_ALIGNMENT_BYTES:]))
        return None if flat is None else flat[_ALIGNMENT_BYTES:]

    def turn_off(self, reason: str) -> None:
        """Return all arrays as they are from now on, and log why. May be called by any thread."""
        if not self._is_off:
            self._is_off = True
            _log.warning("Large messages are sent through sockets, not in shared memory: %s.", reason)

    def _filled(
        self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]
    ) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a free segment after ``fill(bytes)``; None without shared memory, which is logged."""
        try:
            owned = self._take_free(num_bytes)
        except (OSError, AttributeError) as error:  # a system without memfds, or without memory for one
            self.turn_off(str(error))
            return None
        nonce = secrets.token_bytes(_NONCE_BYTES)
        owned.memory[:_NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        fill(owned.memory[:num_bytes])
        _lock(owned.fd, fcntl.F_UNLCK)  # nobody but this thread fills it
        self._num_fillings += 1
        owned.filled_at = self._num_fillings
        try:
            segment = Segment.hold(os.getpid(), owned.fd, nonce.hex(), num_bytes)
        except OSError as error:
            self.turn_off(str(error))
            return None
        return np.frombuffer(segment, np.uint8)

    def _take_free(self, num_bytes: int) -> _Owned:
        """Return a segment with the write lock: the smallest free one that is large enough, or a new one."""
        self._owned.sort(key=lambda owned: owned.memory.size)
        for owned in self._owned:
            if owned.memory.size >= num_bytes and _try_lock(owned.fd, fcntl.F_WRLCK):
                self._drop_idle(owned)
                return owned
        if len(self._owned) >= _MAX_OWNED:
            self._owned.remove(min(self._owned, key=lambda owned: owned.filled_at))
        owned = _create(-(-num_bytes // _SIZE_STEP_BYTES) * _SIZE_STEP_BYTES)
        self._owned.append(owned)
        _lock(owned.fd, fcntl.F_WRLCK)
        return owned

    def _drop_idle(self, taken: _Owned) -> None:
        oldest = min(self._owned, key=lambda owned: owned.filled_at)
        if oldest is not taken and self._num_fillings - oldest.filled_at > _MAX_IDLE_FILLINGS:
            self._owned.remove(oldest)


def _create(num_bytes: int) -> _Owned:
    fd = os.memfd_create("rlzmq_segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # a lack of memory shows here, not when an array is written
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return _Owned(fd, np.frombuffer(memory, np.uint8))


def _open_filling(pid: int, fd: int, nonce: str, num_bytes: int) -> int:
    """Return a descriptor with a read lock on a filling; see `Segment.hold`."""
    # The path may lead to anything that the named process has opened: a read-only descriptor does it no harm.
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        try:
            is_segment = bool(fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # not in memory
            is_segment = False
        # Reading memory of large pages can fail with SIGBUS, too.
        if not is_segment or os.fstatvfs(own).f_bsize != mmap.PAGESIZE:
            raise OSError(errno.EINVAL, f"descriptor {fd} of process {pid} is no shared memory of fixed size")
        if not _NONCE_BYTES <= num_bytes <= os.fstat(own).st_size:
            raise OSError(errno.EINVAL, f"a segment of {num_bytes} bytes is larger than its memory")
        if not _try_lock(own, fcntl.F_RDLCK) or os.pread(own, _NONCE_BYTES, 0).hex() != nonce:
            raise OSError(errno.ESTALE, "the segment was filled again")
    except BaseException:
        os.close(own)
        raise
    return own


def _lock(fd: int, kind: int) -> None:
    """Lock a segment for all processes that hold this open file (an "open file description lock")."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


def _try_lock(fd: int, kind: int) -> bool:
    try:
        _lock(fd, kind)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


FOLDED_TOPIC = bytes((WIRE_VERSION, FOLDED))
"""Prefix of folded messages, which a SUB socket subscribes to."""

_MAX_HELD = 1024  # each takes two descriptors; who sends more is asked for frames
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
        if len(self._held) >= _MAX_HELD:
            raise OSError(errno.EMFILE, f"{_MAX_HELD} segments are held here")
        segment = Segment.hold(folded.pid, folded.fd, folded.nonce, folded.num_bytes)
        self._held[folded.nonce] = segment
        view, outside = memoryview(segment), iter(frames[2:])
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
    """Return the checked header of a message of one of the two kinds."""
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
