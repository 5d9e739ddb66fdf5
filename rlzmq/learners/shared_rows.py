"""SharedRows: memory mapped by the learner ranks of one host, with a row for each rank.

A waiting rank spins for a moment and then sleeps on a semaphore in that memory. An exchange costs microseconds, where
one over a loopback socket costs most of a millisecond. The memory has no name, so nothing remains of it after the last
rank has ended, for any reason.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import select
import time
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SharedRows"]

# A rank that arrives a little later than its peers finds them awake. On busy cores, longer spinning delays those peers.
_SPIN_S = 100e-6
# How often a sleeping rank checks that the peer it waits for still exists.
_LOOK_EVERY_S = 0.02
_LINE_BYTES = 128  # a pair of cache lines, so that no two semaphores share one (a sem_t has at most 64 bytes)
_PAGE_BYTES = mmap.PAGESIZE
_NONCE_BYTES = 16


class _Group(Protocol):
    """The interface that ranks need to agree on the memory; see `rlzmq.learners.distributed.RankGroup`."""

    rank: int
    timeout_s: float
    host_ranks: list[int]

    def gather_bytes(self, data: bytes) -> list[bytes]: ...


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Semaphores:
    """POSIX semaphores shared by processes. Posting and taking one orders memory on every architecture."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL during the call, which takes less time than releasing it; CDLL releases it.
        brief, sleeping = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        self.initialize = brief.sem_init
        self.initialize.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self.post = brief.sem_post
        self.post.argtypes = (ctypes.c_void_p,)
        self.try_to_take = brief.sem_trywait
        self.try_to_take.argtypes = (ctypes.c_void_p,)
        self.try_to_take_and_switch = sleeping.sem_trywait  # lets other threads run
        self.try_to_take_and_switch.argtypes = (ctypes.c_void_p,)
        self.take_before = sleeping.sem_clockwait  # unlike sem_timedwait, unaffected by changes of the date
        self.take_before.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


class _Peer:
    """Another rank: whether it still exists, and the semaphores between it and this rank."""

    def __init__(self, rank: int, pid: int, posted_by_it: int, posted_by_me: int, has_left: Tensor) -> None:
        self.rank = rank
        self.posted_by_it = posted_by_it
        self.posted_by_me = posted_by_me
        self._has_left = has_left
        self._process = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)

    def is_gone(self) -> bool:
        """Return whether its process has ended or it has closed its rows."""
        return bool(self._has_left[0]) or bool(self._poll.poll(0))

    def close(self) -> None:
        os.close(self._process)


class SharedRows:
    """One row of bytes per rank of a host, for repeated exchanges: every rank fills its own row and reads all rows.

    An exchange is `begin`, `post`, `wait`. All ranks must make the same exchanges in the same order. There are two
    sets of rows, used in turn, so that a rank can fill its next row while slower peers still read the previous ones.
    The rows of a `wait` do not change until this rank calls `post` again.

    Only one thread may use an object. Create it with `map`.

    Attributes:
        rows: Both sets, uint8 ``[2, number of ranks on the host, row_bytes]``, in the order of the ranks.
        index: Which row is this rank's.
    """

    def __init__(self, group: _Group, memory: mmap.mmap, row_bytes: int, pids: list[int]) -> None:
        self._timeout_s = group.timeout_s
        self._memory = memory
        self._semaphores = _Semaphores()
        size = len(group.host_ranks)
        self.index: int = group.host_ranks.index(group.rank)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        self.rows: Tensor = flat[_begin_of_rows(size) :].view(2, size, row_bytes)
        self._turn = 0
        self._is_posted = False
        flags = flat[_NONCE_BYTES : _NONCE_BYTES + size]
        self._left = flags[self.index : self.index + 1]
        address = flat.data_ptr()
        self._peers: list[_Peer] = []
        for peer, rank in enumerate(group.host_ranks):
            if peer != self.index:
                its, mine = (
                    address + _begin_of_semaphore(sender, receiver, size)
                    for sender, receiver in ((peer, self.index), (self.index, peer))
                )
                self._peers.append(_Peer(rank, pids[peer], its, mine, flags[peer : peer + 1]))

    @classmethod
    def map(cls, group: _Group, row_bytes: int) -> Self | str:
        """Create the memory of each host's ranks. A collective of all ranks of all hosts.

        Args:
            group: The ranks.
            row_bytes: Minimum number of bytes per row; equal on all ranks.

        Returns:
            The rows, or the reason why a host has none, on all ranks.
        """
        row_bytes = -(-row_bytes // _PAGE_BYTES) * _PAGE_BYTES
        fd = rows = None
        failure = place = ""
        try:
            if group.rank == group.host_ranks[0]:
                fd = _create(len(group.host_ranks), row_bytes)
                place = f"/proc/{os.getpid()}/fd/{fd} {os.pread(fd, _NONCE_BYTES, 0).hex()}"
            mine = f"{row_bytes} {os.getpid()} {place}"
        except (OSError, AttributeError) as error:
            failure, mine = str(error), ""
        told = [data.decode().split() for data in group.gather_bytes(mine.encode())]
        if all(told):
            try:
                if {of_rank[0] for of_rank in told} != {told[0][0]}:
                    raise OSError("rows of different sizes")
                here = [told[rank] for rank in group.host_ranks]
                memory = _map(here[0][2], bytes.fromhex(here[0][3]))
                rows = cls(group, memory, row_bytes, [int(of_rank[1]) for of_rank in here])
            except (OSError, AttributeError) as error:
                failure = str(error)
        failures = [data.decode() for data in group.gather_bytes(failure.encode())]
        if fd is not None:
            os.close(fd)
        if rows is None or any(failures):
            if rows is not None:
                rows.close()
            return next(filter(None, failures))
        return rows

    def begin(self) -> int:
        """Return the set (0 or 1) in which this rank may now fill its row.

        If an exchange was posted without a wait, wait for it first.
        """
        if self._is_posted:
            self.wait()
        return self._turn

    def post(self) -> None:
        """Publish this rank's row, filled since `begin`. Does not block."""
        self._is_posted = True
        for peer in self._peers:
            self._semaphores.post(peer.posted_by_me)

    def wait(self) -> int:
        """Wait until every rank has published its row; return the set in which all rows can be read.

        Raises:
            DistNetworkError: A peer died, left, or did not arrive in time.
        """
        for peer in self._peers:
            if self._semaphores.try_to_take(peer.posted_by_it) != 0:
                self._wait_for(peer)
        turn, self._turn, self._is_posted = self._turn, 1 - self._turn, False
        return turn

    def _wait_for(self, peer: _Peer) -> None:
        semaphores = self._semaphores
        began_at = time.perf_counter()
        while time.perf_counter() - began_at < _SPIN_S:
            # no sched_yield, which would cost this rank a time slice when other processes want the core
            if semaphores.try_to_take_and_switch(peer.posted_by_it) == 0:
                return
        until = _Timespec()
        deadline = time.monotonic() + self._timeout_s
        while True:
            now = time.monotonic()
            until.tv_sec, until.tv_nsec = divmod(int((now + _LOOK_EVERY_S) * 1e9), 10**9)
            if semaphores.take_before(peer.posted_by_it, time.CLOCK_MONOTONIC, until) == 0:
                return
            if peer.is_gone():
                if semaphores.try_to_take(peer.posted_by_it) == 0:  # its last post
                    return
                raise dist.DistNetworkError(f"rank {peer.rank} has ended or left the group")
            if now >= deadline:
                raise dist.DistNetworkError(f"rank {peer.rank} did not come within {self._timeout_s:g} s")

    def close(self) -> None:
        """Leave the group; peers that wait for this rank fail. Idempotent."""
        self._left[0] = 1
        for peer in self._peers:
            peer.close()
        self._peers = []


def _begin_of_semaphore(sender: int, receiver: int, world_size: int) -> int:
    num_header_lines = -(-(_NONCE_BYTES + world_size) // _LINE_BYTES)
    return (num_header_lines + sender * world_size + receiver) * _LINE_BYTES


def _begin_of_rows(world_size: int) -> int:
    end = _begin_of_semaphore(world_size - 1, world_size, world_size)
    return -(-end // _PAGE_BYTES) * _PAGE_BYTES


def _create(world_size: int, row_bytes: int) -> int:
    """Return the descriptor of new memory. If the system has no room, this fails here, not at the first write."""
    size = _begin_of_rows(world_size) + 2 * world_size * row_bytes
    fd = os.memfd_create("rlzmq_ranks")
    try:
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, secrets.token_bytes(_NONCE_BYTES), 0)
        memory = mmap.mmap(fd, size)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        semaphores = _Semaphores()
        for sender in range(world_size):
            for receiver in range(world_size):
                place = address + _begin_of_semaphore(sender, receiver, world_size)
                if semaphores.initialize(place, 1, 0) != 0:
                    raise OSError(errno.ENOSYS, "semaphores cannot be shared by processes")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map(path: str, nonce: bytes) -> mmap.mmap:
    """Map the memory; a forked child inherits the mapping, and unmaps its own."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, _NONCE_BYTES, 0) != nonce:
            raise OSError("the ranks are in several process namespaces")
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
