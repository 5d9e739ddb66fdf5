"""The learner role: one rank of the learner group in its own process.

                 event loop                          learner thread
broker ──SHARDs──►  LearnerLink ──exact batch──►  learner.update  ◄── collectives ──► other ranks
broker ◄──DONE────  LearnerLink ◄──results──────
broker ◄─WEIGHTS──  LearnerLink ◄──snapshot─────  (rank 0)
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import secrets
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlzmq.actors.host import ActorHost, CallServer
from rlzmq.actors.messages import NO_CALL_ID, Call, Cancel, Shutdown, decode_message, pack
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults, trace
from rlzmq.core.addresses import split_tcp
from rlzmq.core.call_watch import UpdateWatch
from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.patience import RESEND_S
from rlzmq.core.process import (
    apply_log_level,
    keep_freed_memory,
    limit_memory,
    loopback_interface,
    share_one_arena,
)
from rlzmq.core.spaces import space_from_plain
from rlzmq.learners.ranks import set_torch_threads
from rlzmq.modules.weights import WeightsLayout, has_convolutions
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.events import SocketEvent
from rlzmq.net.keys import JoinFile
from rlzmq.net.socket import DrainSocket
from rlzmq.roles.arrival_log import ArrivalLog
from rlzmq.roles.learner_link import LearnerLink
from rlzmq.roles.peer_link import MAX_MESSAGE_BYTES, PeerRole, new_peer_id, package_version
from rlzmq.wire.codec import Buffer, WireError, kind_of
from rlzmq.wire.messages import Goodbye, Hello, Refused
from rlzmq.wire.messages import decode_message as decode_hello
from rlzmq.wire.messages import encode_message as encode_hello
from rlzmq.wire.payloads import pack_blob, unpack_blob

with contextlib.suppress(ModuleNotFoundError):  # runs in several processes need it, clients do not
    import fcntl

__all__ = ["LearnerRole", "RemoteLearner", "guarded_connections", "interface_for", "make_learner"]


def make_learner(config: BaseConfig, module_spec: object, rank: int = 0, num_ranks: int = 1) -> Any:
    """Return a built Learner of the class given by the config."""
    learner = config.learner_class(config=config, module_spec=module_spec, rank=rank, num_ranks=num_ranks)
    learner.build()
    return learner


class LearnerRole(PeerRole):
    """The actor in a learner's process.

    Plain methods run on the actor's thread, the only one that uses the learner; `async` methods run on
    its event loop.
    """

    def __init__(
        self,
        config: BaseConfig,
        module_spec: object,
        rank: int = 0,
        num_ranks: int = 1,
        incarnation: int = 0,
        *,
        is_local: bool = False,
    ) -> None:
        set_torch_threads(config)
        apply_log_level(config)
        faults.arm(f"learner-{rank}", incarnation)
        trace.join(config.trace, f"learner {rank}")
        faults.at("learner.start")
        limit_memory(config.learner_memory_limit_bytes, "learner_memory_limit_bytes")
        self.config = config
        self.rank: int = rank
        self.learner: Any = make_learner(config, module_spec, rank, num_ranks)
        if has_convolutions(self.learner.module.values()):
            keep_freed_memory()  # their activations are large
        self._synced_module_ids: list[str] | None = None
        self._arrivals: Any = None
        self._called_off: set[int] = set()
        self.update_watch: UpdateWatch = UpdateWatch(
            f"learner-{rank}",
            self.learner.ranks,
            learner_timeout_s=config.learner_timeout_s,
            process_start_timeout_s=config.process_start_timeout_s,
            warn_after_s=config.slow_call_warning_s,
            on_hang=self._report_hang if is_local else None,
        )
        faults.at("learner.started")

    # -- on the actor's thread ------------------------------------------------------------------

    def _join_and_agree(
        self, rank: int, num_ranks: int, store_path: str, generation: int, memory: bytes, num_env_steps: int
    ) -> tuple[bytes, int]:
        """Form the group; all ranks adopt the newest state among them, and the memory of its rank."""
        self.rank = rank
        ranks = self.learner.ranks
        with guarded_connections():
            ranks.join(
                rank=rank,
                world_size=num_ranks,
                store=open_store(store_path, num_ranks),
                timeout_s=self.config.learner_timeout_s,
                forming_timeout_s=connecting_timeout_s(self.config),
                generation=generation,
                interface=interface_for(store_path),
                is_called_off=lambda: generation in self._called_off,
            )
        source = ranks.adopt_newest_state()
        if ranks.group is not None:
            packed = ranks.group.broadcast_bytes(pack_blob([memory, num_env_steps]), source)
            memory, num_env_steps = unpack_blob(packed)
        return memory, num_env_steps

    def ping(self) -> int:
        """Return the weights version, after earlier calls on the actor's thread."""
        return int(self.learner.weights_seq_no)

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """See Learner.update."""
        with self.update_watch.call("an update"):
            return self.learner.update(**kwargs)  # type: ignore[no-any-return]

    def get_state(self, components: str | None = None) -> dict[str, Any]:
        """See Learner.get_state."""
        return self.learner.get_state(components)  # type: ignore[no-any-return]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See Learner.set_state."""
        self.learner.set_state(state)

    def get_inference_weights(self, module_ids: list[str] | None = None) -> tuple[Any, int]:
        """Return (snapshot of the inference weights, version).

        Args:
            module_ids: Modules to include; None: all.
        """
        module = self.learner.module
        layout = WeightsLayout.of(module, inference_only=True, module_ids=module_ids)
        return layout.snapshot(module), self.learner.weights_seq_no

    def change_modules(self, change: Callable[[Any], Any], synced_module_ids: list[str] | None) -> None:
        """Call ``change(learner)``, which adds or removes modules, and publish weights in the new layout.

        Args:
            change: Called between two updates.
            synced_module_ids: Modules whose weights runners need; None: all.
        """
        change(self.learner)
        self._synced_module_ids = synced_module_ids
        if self._link is not None:
            self._link.change_layout(synced_module_ids)

    def close(self) -> None:
        """Leave the process group and close the arrival log, if any."""
        self.update_watch.close()
        self.learner.ranks.leave()
        trace.flush()
        if self._arrivals is not None:
            self._arrivals.close()

    # -- on the event loop ----------------------------------------------------------------------

    async def connect(self, link: Mapping[str, Any]) -> None:
        """Connect to the broker; registration follows once the group is formed (`register_as`, or `rejoin`).

        Raises:
            ConfigurationError: ``config.record_dir`` cannot be used.
        """
        faults.at("learner.connect")
        if self.config.record_dir is not None:
            self._arrivals = ArrivalLog(self.config.record_dir, link["run_id"], self.config)
        self._link = LearnerLink(
            self.learner,
            self._run_blocking,
            watch=self.update_watch,
            of_agents=self.config.is_multi_agent,
            arrivals=self._arrivals,
            **link,
        )
        self._link.change_layout(self._synced_module_ids)
        await self._link.start()

    async def register_as(
        self, rank: int, num_ranks: int, generation: int, num_env_steps_before: int, begins_lineage: bool
    ) -> None:
        """Register under a new generation after the group was formed; updates in flight are discarded.

        Args:
            rank, num_ranks: This learner's rank and the group's size.
            generation: Higher than all earlier ones.
            num_env_steps_before: Env steps trained in the run so far.
            begins_lineage: The driver has sent a RESET of this generation.
        """
        self._link.num_env_steps_before = num_env_steps_before
        self._link.enlist(
            generation=generation, rank=rank, num_ranks=num_ranks, begins_lineage=begins_lineage
        )

    async def rejoin(
        self, rank: int, num_ranks: int, store_path: str, generation: int, registers: bool = True
    ) -> int:
        """Form a new generation with the other ranks; all adopt the newest state among them.

        An update being trained ends or fails first. If the call is cancelled, this rank stops waiting for the
        others at once, or when its attempt to connect to them has failed.

        Args:
            rank, num_ranks: This learner's rank, and the size of the group.
            store_path: A file that all ranks can access and that does not exist yet, or ``tcp://host:port``
                of the driver's TCPStore if ranks are on several machines.
            generation: Increases whenever the group is re-formed.
            registers: Register with the broker at once. False: `register_as` follows, and nothing is trained before it.

        Returns:
            The weights version that all ranks hold now.

        Raises:
            PeerLostError: Not all ranks joined.
            Exception: This rank's training had failed.
        """
        link = self._link
        memory, num_env_steps = b"", 0
        if link is not None:
            link.begin_forming()
            await self._run_blocking(lambda: None)  # its results are noted when this returns
            if link.ended.done():
                await link.ended  # raises the link's error
            memory, num_env_steps = link.core.export_memory(), link.num_env_steps_before
        faults.at("learner.join")
        try:
            memory, num_env_steps = await self._run_blocking(
                lambda: self._join_and_agree(rank, num_ranks, store_path, generation, memory, num_env_steps)
            )
        except asyncio.CancelledError:
            self._called_off.add(generation)
            raise
        if link is not None and registers:
            link.num_env_steps_before = num_env_steps
            link.enlist(generation=generation, rank=rank, num_ranks=num_ranks, memory=memory)
        return int(self.learner.weights_seq_no)

    async def run_until_failure(self) -> tuple[str, str]:
        """Return (reason, detail) once the connection to the broker has ended.

        Raises:
            PeerLostError: Another rank was lost; `rejoin` re-forms the group.
            Exception: Training failed.
        """
        link = self._link
        if link is None:
            return "", ""
        await asyncio.wait((link.ended, link.group_lost), return_when=asyncio.FIRST_COMPLETED)
        if not link.ended.done():
            raise PeerLostError(link.group_lost.result())
        return await link.ended  # type: ignore[no-any-return]


# An unreachable machine does not close its connections: a collective would wait until its timeout. With these
# settings the system probes the other side after a second of silence, and drops the connection after three.
_KEEPALIVE_S, _NUM_KEEPALIVES = 1, 3
# The request for all IPv4 addresses of this machine, from Linux's headers (netdevice(7)).
_SIOCGIFCONF, _IFREQ_BYTES, _MAX_INTERFACES = 0x8912, 40, 1024


def open_store(place: str, num_ranks: int) -> Any:
    """Return the store at a file's path, or at ``tcp://host:port``."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    if not place.startswith("tcp://"):
        return FileStore(place, num_ranks)
    host, port = split_tcp(place)
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def interface_for(place: str) -> str | None:
    """Return the network interface for connections between ranks: loopback for a file, else that of the store's route.

    The result is None if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set.
    """
    if not place.startswith("tcp://"):
        return loopback_interface()
    if os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME"):
        return None
    host, port = split_tcp(place)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, only looks up the route
        own = probe.getsockname()[0]
        return _interface_of(probe, own.partition("%")[0])


def _interface_of(any_socket: socket.socket, address: str) -> str | None:
    """Return the interface that has this address of this machine; None if it cannot be found."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    if len(packed) == 16:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if bytes.fromhex(digits) == packed:
                    return name
        return None
    entries = array.array("B", bytes(_IFREQ_BYTES * _MAX_INTERFACES))
    request = struct.pack("iL", len(entries), entries.buffer_info()[0])
    with contextlib.suppress(OSError):
        used = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
        for start in range(0, used, _IFREQ_BYTES):  # 16 bytes of name; family, port, address
            entry = entries[start : start + _IFREQ_BYTES].tobytes()
            if entry[20:24] == packed:
                return entry[:16].partition(b"\0")[0].decode()
    return None


@contextlib.contextmanager
def guarded_connections() -> Iterator[None]:
    """Set keepalive on TCP connections created within the block, so that they break soon after a peer vanishes.

    torch.distributed has no such setting; its sockets are found among the process's open files.
    """
    before = _socket_inodes()
    yield
    for inode, fd in _socket_inodes().items():
        if inode in before:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:  # the same connection
            if ours.proto != socket.IPPROTO_TCP:
                continue
            ours.getpeername()  # OSError where it only listens
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)
            ours.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _KEEPALIVE_S * _NUM_KEEPALIVES
            )


def _socket_inodes() -> dict[int, int]:
    """Return the descriptor of every socket of this process, by inode."""
    found = {}
    with contextlib.suppress(OSError):  # no /proc: no guard
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found


def connecting_timeout_s(config: BaseConfig) -> float:
    """Return the seconds that ranks have to connect once all are present; NCCL's first connection is slow."""
    return 30.0 if config.num_gpus_per_learner else 4.0


# The only methods that the driver may call: other methods of LearnerRole take functions.
_METHODS = frozenset(
    {
        "",
        "connect",
        "disconnect",
        "register_as",
        "get_inference_weights",
        "get_state",
        "ping",
        "rejoin",
        "run_until_failure",
        "set_state",
        "update",
    }
)
_LAST_WORDS_S = 0.1  # the driver's last messages may still wait in the socket


class RemoteLearner:
    """A learner that joins a run by itself, from another terminal or machine; the driver assigns its rank.

    It says HELLO until the driver calls `build`; then it serves LearnerRole's methods.

    Args:
        join: Addresses and keys.
        make_config: Makes the run's config from `joining.pack_config`'s frame.
        preferred_rank: Rank given by a scheduler (RANK, SLURM_PROCID); -1: none.
        timeout_s: How long it waits for a driver.
    """

    def __init__(
        self, join: JoinFile, make_config: Callable[[Any], Any], *, preferred_rank: int, timeout_s: float
    ) -> None:
        self.name: str = f"learner-{secrets.token_hex(3)}@{socket.gethostname()[:100]}"
        self._join = join
        self._make_config = make_config
        self._rank = preferred_rank
        self._timeout_s = timeout_s
        share_one_arena()
        self._host = ActorHost("learner")
        self._calls = CallServer(self.name, self._send)
        self._was_called = False
        self._is_connected = self._is_told = False

    async def run(self) -> None:
        """Serve until the run's end.

        Raises:
            PeerLostError: There is no driver, or it is gone.
        """
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        context = Context()
        self._socket = DrainSocket(
            context,
            "DEALER",
            self._on_message,
            options=SocketOptions(
                max_message_bytes=MAX_MESSAGE_BYTES, linger_ms=500, receive_high_water_mark=0
            ),
            routing_id=f"{self.name}.{new_peer_id()}".encode()[:255],
            curve=self._join.curve(),
            on_event=self._on_event,
            packs=True,
            name=self.name,
        )
        try:
            self._socket.connect(self._join.addresses["control"])
            deadline = loop.time() + self._timeout_s
            while not self._was_called and not self._over.done():
                if not self._is_connected and loop.time() > deadline:
                    address = self._join.addresses["control"]
                    raise PeerLostError(f"no driver at {address} within {self._timeout_s:g} s")
                hello = Hello(
                    "learner", self.name, self.name, rank=self._rank, package_version=package_version()
                )
                self._socket.send(encode_hello(hello))
                await asyncio.wait((self._over,), timeout=RESEND_S / 2)
            await self._over
        finally:
            self._calls.cancel_all()
            self._socket.close()
            self._host.close()
            await context.aclose()

    def end(self, error: BaseException | None = None) -> None:
        """`run` returns, or raises `error`."""
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)

    # -- what the driver says -------------------------------------------------------------------

    def _on_event(self, event: SocketEvent) -> None:
        self._is_connected = event.kind == "connected" or (self._is_connected and event.kind == "retrying")
        if event.kind == "retrying" and not (self._is_connected or self._is_told):
            self._is_told = True
            print(
                f"{self.name}: {self._join.absence('control')}. Waiting for it.", file=sys.stderr, flush=True
            )
        if event.kind == "disconnected" and self._was_called:
            # The driver has given this rank up by now; as a new process it may come again.
            error = PeerLostError("the connection to the driver broke")
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.end, error)

    def _on_message(self, frames: list[Any]) -> None:
        try:
            if kind_of(frames) < 128:  # not a call: the driver turns this learner away
                answer, _ = decode_hello(frames)
                if isinstance(answer, Refused):
                    self.end(PeerLostError(f"the driver refuses this learner: {answer.detail}"))
                elif isinstance(answer, Goodbye):
                    print(f"{self.name}: {answer.reason}", flush=True)
                    self.end()
                return
            message, value = decode_message(frames)
        except (WireError, ProtocolError) as error:
            self.end(PeerLostError(f"the driver's message cannot be read: {error}"))
            return
        if isinstance(message, Call):
            self._was_called = True
            self._calls.begin(message.call_id, self._call(message.method, *value))
        elif isinstance(message, Cancel):
            self._calls.cancel(message.call_id)
        elif isinstance(message, Shutdown):
            if message.call_id == NO_CALL_ID:
                print(f"{self.name}: the driver stopped this learner", file=sys.stderr, flush=True)
                os._exit(75)  # a blocked training thread would keep the process
            self._calls.begin(message.call_id, self._stop())

    async def _call(self, method: str, args: Any, kwargs: Any) -> list[Any]:
        if method == "build":
            await self._build(*args)
            return pack(None, "build")
        if method not in _METHODS:
            raise ProtocolError(f"a learner that joined has no method {method!r}")
        if method == "connect":
            # The driver's own addresses and (no) keys mean nothing here.
            own = {"data_address": self._join.addresses["data"], "curve": self._join.curve()}
            args = ({**args[0], **own}, *args[1:])
        return await self._host.answer(method, args, kwargs)

    async def _build(self, packed: Buffer, spaces: Sequence[Any], rank: int, num_ranks: int) -> None:
        single = tuple(space_from_plain(space) for space in spaces)

        def make() -> LearnerRole:
            config = self._make_config(packed)
            spec = config.get_multi_rl_module_spec(spaces={"__env_single__": single, "__env__": single})
            return LearnerRole(config, spec, rank, num_ranks)

        await self._host.construct(make)
        print(f"{self.name} is rank {rank} of {num_ranks}", flush=True)

    async def _stop(self) -> list[Any]:
        try:
            await self._host.stop()
            return pack(None, "stop")
        finally:
            asyncio.get_running_loop().call_soon(self.end)  # once the answer is sent

    def _send(self, frames: list[Any]) -> None:
        if not self._socket.closed:
            self._socket.send(frames)
