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

import numpy as np
import numpy.typing as npt

with contextlib.suppress(ModuleNotFoundError):  # runs in several processes need it, clients do not
    import fcntl

__all__ = [
    "MIN_SHARED_BYTES",
    "Segment",
    "SegmentPool",
    "min_shared_bytes",
    "read_segment",
]

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


def read_segment(pid: int, fd: int, nonce: str, num_bytes: int) -> bytearray:
    """Return a copy of a filling; arguments and errors are those of `Segment.hold`."""
    own = _open_filling(pid, fd, nonce, num_bytes)
    try:
        copy = bytearray(num_bytes)
        if os.preadv(own, [copy], 0) != num_bytes:
            raise OSError(errno.EIO, "the segment could not be read")
        return copy
    finally:
        os.close(own)


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
