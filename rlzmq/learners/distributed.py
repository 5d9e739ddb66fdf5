"""RankGroup: the process group of one generation of learners, with shared memory, averages and typed failures.

A waiting rank spins for a moment and then sleeps on a semaphore in that memory. An exchange costs microseconds, where
one over a loopback socket costs most of a millisecond. The memory has no name, so nothing remains of it after the last
rank has ended, for any reason.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlzmq.core import faults, trace
from rlzmq.core.errors import PeerLostError, RlzmqError
from rlzmq.core.process import process_space

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "DesynchronizedError",
    "GradientAverage",
    "RankGroup",
    "SharedRows",
]


# A rank that arrives a little later than its peers finds them awake. On busy cores, longer spinning delays those peers.
_SPIN_S = 100e-6
# How often a sleeping rank checks that the peer it waits for still exists.
_LOOK_EVERY_S = 0.02
_LINE_BYTES = 128  # a pair of cache lines, so that no two semaphores share one (a sem_t has at most 64 bytes)
_PAGE_BYTES = mmap.PAGESIZE
_NONCE_BYTES = 16


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

    def __init__(self, group: RankGroup, memory: mmap.mmap, row_bytes: int, pids: list[int]) -> None:
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
    def map(cls, group: RankGroup, row_bytes: int) -> Self | str:
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


# Texts of a failed collective (gloo, NCCL, the stores). Any other RuntimeError is a bug and is not converted.
_PEER_LOST_MARKS = (
    "gloo",
    "nccl",
    "closed by peer",
    "connection reset",
    "timed out",
    "wait timeout",
    "pair closure",
    "broken pipe",
)


_POLL_EVERY_S = 0.005  # interval of polling the store (a file or a server)
_MAX_GATHERED = 500  # more numbers than fit into a page go through the process group
_log = logging.getLogger("rlzmq.learners")


class DesynchronizedError(RlzmqError, RuntimeError):
    """Learner ranks are at different steps or generations. No step was taken; re-form the group."""


class RankGroup:
    """Learner ranks 0 … world_size - 1 of one generation, over torch's default process group.

    Guarantees:

    * Every method is a collective: all ranks must call the same methods in the same order.
    * If a peer dies, the collective of the others raises `PeerLostError` within milliseconds; if a peer hangs, after
      `timeout_s`. Afterwards only `close` may be called.
    * Ranks of different generations never connect: each generation has its own part of the store.

    A survivor continues in the same process: ``group.close()``, then a new RankGroup at the next generation.

    Args:
        backend: "gloo" (CPU) or "nccl" (CUDA).
        rank: This process's index, in ``range(world_size)``.
        world_size: Number of ranks.
        store: A torch.distributed Store that all ranks can reach and that outlives them.
        timeout_s: Seconds after which a collective without its peers fails.
        forming_timeout_s: Seconds in which ranks must connect to each other once all have reached the store; None:
            `timeout_s`.
        is_called_off: Polled while this rank waits for the others in the store. True aborts the wait.
        generation: Increases by one each time the group is re-formed.
        device: Device of the collectives' tensors; None: the CPU, or the current CUDA device for NCCL.
        interface: Network interface to listen on, e.g. `loopback_interface()` if all ranks share a machine;
            None: taken from the environment (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).

    Attributes:
        host_ranks: The ranks on this rank's host, in increasing order.
        num_hosts: Number of hosts that have ranks.
        shares_memory: Whether the ranks of each host share memory; the same on all ranks. False if no host has two.
        process_group: torch's group of all ranks.
        first_ranks: torch's group of each host's first rank; only on these ranks, if there are several hosts.
        num_entered: Number of waits for peers that this rank has entered.
        is_waiting: Whether this rank waits for peers.
        waited_s: Seconds spent on exchanges with peers.

    Raises:
        PeerLostError: Not all ranks arrived in time, or the wait was aborted. The attempt leaves nothing behind: the
            same process can form the next generation.
        ValueError: `rank` is out of range.
    """

    def __init__(
        self,
        *,
        backend: Literal["gloo", "nccl"] = "gloo",
        rank: int,
        world_size: int,
        store: Store,
        timeout_s: float = 60.0,
        forming_timeout_s: float | None = None,
        generation: int = 0,
        device: torch.device | None = None,
        interface: str | None = None,
        is_called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 ≤ rank < world_size={world_size}, got {rank}.")
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.timeout_s = timeout_s
        self.device: torch.device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        self.num_entered: int = 0
        self.is_waiting: bool = False
        self.waited_s: float = 0.0
        self.host_ranks: list[int] = [rank]
        self.num_hosts: int = 1
        self.process_group: dist.ProcessGroup | None = None
        self.first_ranks: dist.ProcessGroup | None = None
        self.shares_memory: bool = False
        self._numbers: SharedRows | None = None
        self._closed = False
        self._owns_group = not dist.is_initialized()  # torch allows only one; an existing one is kept
        store = dist.PrefixStore(f"rlzmq/generation_{generation}", store)  # type: ignore[attr-defined]
        forming_s = timeout_s if forming_timeout_s is None else forming_timeout_s
        with _listening_on(interface), self.typed_errors("forming the group"):
            self._meet(store, timeout_s, is_called_off)
            try:
                self._connect(backend, store, timeout_s, forming_s)
            except BaseException:
                self.close()
                raise

    def _meet(self, store: Store, timeout_s: float, is_called_off: Callable[[], bool]) -> None:
        """Wait until every rank has arrived. Unlike torch's own wait, name missing ranks and allow aborting."""
        deadline = time.monotonic() + timeout_s
        store.set(f"here/{self.rank}", "1")
        missing = set(range(self.world_size))
        while missing := {rank for rank in missing if not store.check([f"here/{rank}"])}:
            if is_called_off():
                raise PeerLostError(f"generation {self.generation} was called off: a rank died or hangs.")
            if time.monotonic() >= deadline:
                raise PeerLostError(
                    f"learner rank {self.rank} of {self.world_size}, generation {self.generation}: "
                    f"{_listed(missing)} did not arrive within {timeout_s:g} s."
                )
            time.sleep(_POLL_EVERY_S)

    def _connect(self, backend: str, store: Store, timeout_s: float, forming_timeout_s: float) -> None:
        # torch uses the number of default groups that a process has created, or tried to create, as prefix in the
        # store, so ranks with different histories would never connect.
        if self._owns_group:
            dist.distributed_c10d._world.group_count = 0
        faults.at("learner.met")
        hook = sys.excepthook  # each group wraps it and never unwraps it
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=forming_timeout_s),
            )
        finally:
            sys.excepthook = hook
        self.process_group = dist.group.WORLD
        # Connect every pair now: if a peer died before the first collective, the wait could exceed the timeout.
        self._barrier()
        faults.at("learner.connected")
        self._share_memory(forming_timeout_s)
        if forming_timeout_s != timeout_s:
            # There is no public way to change the timeout, and a second group would connect all ranks twice.
            for group in (self.process_group, self.first_ranks):
                if group is not None:
                    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def _share_memory(self, timeout_s: float) -> None:
        """Share memory with the ranks of this host, and connect the hosts' first ranks. A collective."""
        if self.world_size == 1 or self.device.type != "cpu":
            return
        by_host: dict[bytes, list[int]] = {}
        names = self.gather_bytes(process_space().encode())
        for rank, name in enumerate(names):
            by_host.setdefault(name, []).append(rank)
        self.host_ranks, self.num_hosts = by_host[names[self.rank]], len(by_host)
        if self.num_hosts > 1:
            if self.num_hosts == self.world_size or self.process_group is not dist.group.WORLD:
                return
            first_ranks = [ranks[0] for ranks in by_host.values()]
            between_hosts = dist.new_group(first_ranks, timeout=timedelta(seconds=timeout_s))
            if self.rank in first_ranks:
                self.first_ranks = between_hosts
                dist.all_reduce(torch.zeros(1), group=between_hosts)  # connects them, see above
        self.shares_memory = True
        self._numbers = self.share_rows(8 * _MAX_GATHERED)
        self.shares_memory = self._numbers is not None

    def share_rows(self, row_bytes: int) -> SharedRows | None:
        """Return memory that the ranks of this host share; None on all ranks if a host has none, or on GPUs.

        A collective of all ranks. If the memory is missing, rank 0 logs why, once.

        Args:
            row_bytes: Number of bytes that a rank publishes in one exchange.
        """
        if not self.shares_memory:
            return None
        rows = SharedRows.map(self, row_bytes)
        if isinstance(rows, SharedRows):
            return rows
        if self.rank == 0:
            _log.warning("the learner ranks exchange gradients through gloo, without shared memory: %s", rows)
        return None

    def gather(self, values: Sequence[float] | NDArray[Any], *, step: Sequence[int] = ()) -> NDArray[Any]:
        """Return every rank's numbers, int64 or float64 ``[world_size, len(values)]``.

        Args:
            values: This rank's numbers, equally many on all ranks: integers on all of them, or floats on all of them.
            step: Numbers that say where this rank is; they must be equal on all ranks.

        Raises:
            DesynchronizedError: The ranks are at different steps, or gather different things.
        """
        mine = np.asarray(values)
        kind = mine.dtype if mine.dtype == np.float64 else np.dtype(np.int64)
        head = [len(mine), *step]
        row = np.concatenate([np.array(head, np.int64), mine.astype(kind).view(np.int64)])
        with self.typed_errors("gathering numbers"):
            rows = self._numbers
            if rows is not None and self.num_hosts == 1 and len(row) <= _MAX_GATHERED:
                table = rows.rows.numpy().view(np.int64)
                table[rows.begin(), rows.index, : len(row)] = row
                rows.post()
                table = table[rows.wait(), :, : len(row)].copy()
            else:
                shared = torch.zeros((self.world_size, len(row)), dtype=torch.int64, device=self.device)
                shared[self.rank] = torch.from_numpy(row)
                dist.all_reduce(shared, group=self.process_group)
                table = shared.cpu().numpy()
        heads = table[:, : len(head)].tolist()
        if any(one != head for one in heads):
            raise DesynchronizedError(
                f"rank {self.rank} of generation {self.generation}: expected all {self.world_size} ranks at the same "
                f"step, got {heads}. Nothing of it counts; re-form the group and broadcast one rank's state."
            )
        return table[:, len(head) :].view(kind)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        sizes = self.gather([len(data)])[:, 0].tolist()
        num_words = -(-max(sizes) // 8)
        words = np.frombuffer(data.ljust(8 * num_words, b"\0"), np.int64)
        packed = [row.tobytes() for row in self.gather(words)]
        return [of_rank[:size] for of_rank, size in zip(packed, sizes, strict=True)]

    def broadcast_bytes(self, data: bytes | None, source_rank: int) -> bytes:
        """Return `source_rank`'s bytes on every rank (the others pass None)."""
        payload = data or b""
        size = int(self.gather([len(payload)])[source_rank, 0])
        buffer = torch.zeros(size, dtype=torch.uint8)
        if size and self.rank == source_rank:
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        buffer = buffer.to(self.device)
        with self.typed_errors("broadcast"):
            dist.broadcast(buffer, src=source_rank, group=self.process_group)
        return buffer.cpu().numpy().tobytes()

    def close(self) -> None:
        """Leave the group. Idempotent, also after a failure."""
        if self._closed:
            return
        self._closed = True
        if self._numbers is not None:
            self._numbers.close()
        between_hosts, self.first_ranks = self.first_ranks, None
        self.process_group = None  # dropping the last reference closes the connections
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        elif between_hosts is not None:
            dist.destroy_process_group(between_hosts)

    def _barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.process_group)

    def typed_errors(self, what: str) -> AbstractContextManager[None]:
        """Convert failures of the block's waits for peers into PeerLostError that names the operation."""
        return _Exchange(self, what)


class _Exchange:
    """The context of `RankGroup.typed_errors`. It is a class because it is entered for each minibatch."""

    def __init__(self, group: RankGroup, what: str) -> None:
        self._group, self._what = group, what

    def __enter__(self) -> None:
        self._group.num_entered += 1
        self._group.is_waiting = True
        self._began_at = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        group, ended_at = self._group, time.perf_counter()
        group.is_waiting = False
        group.waited_s += ended_at - self._began_at
        if trace.is_on:
            trace.span("reduce", self._began_at, ended_at, operation=self._what)
        if isinstance(error, RuntimeError) and _is_of_peers(error):
            raise PeerLostError(
                f"learner rank {group.rank} of {group.world_size}, generation {group.generation}: {self._what} "
                f"failed because a peer died or hangs: {str(error).splitlines()[0]}. "
                "Re-form the group from the surviving ranks at the next generation."
            ) from error


def _is_of_peers(error: RuntimeError) -> bool:
    """Return whether a collective failed because of a peer; any other error is a bug."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(mark in text for mark in _PEER_LOST_MARKS)


def _listed(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


@contextmanager
def _listening_on(interface: str | None) -> Iterator[None]:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, interface or ""))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_ALIGN_BYTES = 64


class GradientAverage:
    """Averages gradients over ranks, in one exchange after the backward pass; buffers become those of rank 0.

    Each host's gradients are summed in the order of its ranks. With several hosts, the first ranks sum these sums, so
    each crosses the network once. All ranks get the same bits. Without shared memory, torch's process group sums them.
    A parameter without a gradient on a rank counts as zeros, so ranks may train different modules.

    Args:
        group: The ranks.
        parameters: All trainable parameters.
        buffers: All buffers, e.g. a BatchNorm's statistics.
    """

    def __init__(self, group: RankGroup, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self._group = group
        self._parameters, self._buffers = parameters, buffers
        self._layouts = gradients, others = _Layout(parameters), _Layout(buffers)
        num_bytes = gradients.num_bytes + others.num_bytes
        self._row = torch.zeros(num_bytes, dtype=torch.uint8, device=group.device)
        self._result = self._placed(self._row)
        self._rows = group.share_rows(num_bytes) if num_bytes else None
        if self._rows is not None:
            self._by_turn = [[self._placed(row) for row in of_turn] for of_turn in self._rows.rows]

    def _placed(self, row: Tensor) -> _Placed:
        gradients, buffers = self._layouts
        begin, end = gradients.num_bytes, gradients.num_bytes + buffers.num_bytes
        return _Placed(*gradients.on(row), buffers.on(row[begin:])[0], row[begin:end])

    def run(self) -> None:
        """Replace each parameter's gradient by its mean over the ranks; the next call overwrites it.

        Raises:
            PeerLostError: A peer died or hangs.
        """
        with self._group.typed_errors("gradient exchange"), torch.no_grad():
            if self._rows is None:
                self._fill(self._result)
                self._reduce(self._group.process_group)
            else:
                self._sum_in_memory(self._rows)
            for parameter, mean in zip(self._parameters, self._result.gradients, strict=True):
                parameter.grad = mean
            if self._buffers and self._group.rank:
                torch._foreach_copy_(list(self._buffers), self._result.buffers)

    def _fill(self, mine: _Placed) -> None:
        gradients = [p.grad for p in self._parameters]
        for view, gradient in zip(mine.gradients, gradients, strict=True):
            if gradient is None:
                view.zero_()
        filled = [(view, g) for view, g in zip(mine.gradients, gradients, strict=True) if g is not None]
        if filled:
            torch._foreach_copy_(*map(list, zip(*filled, strict=True)))  # type: ignore[arg-type]
        for block in mine.blocks:
            block.mul_(1 / self._group.world_size)
        if self._buffers and self._group.rank == 0:
            torch._foreach_copy_(mine.buffers, list(self._buffers))

    def _reduce(self, process_group: dist.ProcessGroup | None) -> None:
        for block in self._result.blocks:
            dist.all_reduce(block, group=process_group)
        if self._buffers:
            dist.broadcast(self._result.rest, src=0, group=process_group)

    def _sum_in_memory(self, rows: SharedRows) -> None:
        result = self._result
        self._fill(self._by_turn[rows.begin()][rows.index])
        rows.post()
        first, *others = self._by_turn[rows.wait()]
        for index, total in enumerate(result.blocks):
            torch.add(first.blocks[index], others[0].blocks[index], out=total) if others else total.copy_(
                first.blocks[index]
            )
            for other in others[1:]:
                total.add_(other.blocks[index])
        result.rest.copy_(first.rest)
        if self._group.num_hosts == 1:
            return
        turn, size = rows.begin(), len(self._row)
        if rows.index == 0:
            self._reduce(self._group.first_ranks)
            rows.rows[turn, 0, :size] = self._row
        rows.post()
        turn = rows.wait()
        if rows.index:
            self._row.copy_(rows.rows[turn, 0, :size])

    def close(self) -> None:
        """Leave the shared memory. Idempotent."""
        if self._rows is not None:
            self._rows.close()


class _Placed(NamedTuple):
    """Views of a row of bytes: gradients, one flat block of them per dtype, buffers, and all bytes of these."""

    gradients: list[Tensor]
    blocks: list[Tensor]
    buffers: list[Tensor]
    rest: Tensor


class _Layout:
    """The positions of tensors in a row of bytes; those of one dtype are adjacent."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        order = sorted(range(len(tensors)), key=lambda index: str(tensors[index].dtype))
        self._tensors = tensors
        self._dtypes: list[tuple[torch.dtype, list[int], int, int]] = []
        begin = 0
        for dtype, group in groupby(order, key=lambda index: tensors[index].dtype):
            members = list(group)
            end = begin + dtype.itemsize * sum(tensors[index].numel() for index in members)
            self._dtypes.append((dtype, members, begin, end))
            begin = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        self.num_bytes = begin

    def on(self, row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors' views of a row, uint8 ``[num_bytes or more]``, and one flat block per dtype."""
        views: dict[int, Tensor] = {}
        blocks = []
        for dtype, members, begin, end in self._dtypes:
            block = row[begin:end].view(dtype)
            blocks.append(block)
            offset = 0
            for index in members:
                tensor = self._tensors[index]
                part = block[offset : offset + tensor.numel()]
                offset += tensor.numel()
                # the parameter's strides, which fused optimizers need; dense strides if it has gaps
                views[index] = part.as_strided(tensor.shape, torch.empty_like(tensor).stride())
        return [views[index] for index in range(len(self._tensors))], blocks
