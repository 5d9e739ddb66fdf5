"""RemoteLearnerListener: the driver's listener for learners on other machines (``rlzmq learner --join FILE``).

    learner ──HELLO──► listener: queue ──take()──► build(config, spaces), then an actor like any other

A learner that has joined is called like a local learner process (`ActorHandle`), over CURVE and without pickle, and
only with the methods that `learner_role` lists. Surplus learners wait as spares and replace ranks that die. A broken
connection counts as the end of the process.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rlzmq.actors.handle import ActorHandle, ProcessLink
from rlzmq.actors.messages import NO_CALL_ID, Cancel, Shutdown, encode_message
from rlzmq.actors.messages import decode_message as decode_answer
from rlzmq.actors.process_state import ActorLostError, ExitStatus
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.addresses import split_tcp, tcp_address
from rlzmq.core.errors import ConfigurationError, DeadlineError, PeerLostError, ProtocolError
from rlzmq.core.patience import TICK_S
from rlzmq.core.spaces import space_to_plain
from rlzmq.driver.formation import LEARNER_ROLE, StoreServer
from rlzmq.driver.join_files import JoinKeys, at_host, pack_config
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.events import SocketEvent
from rlzmq.net.keys import Authenticator
from rlzmq.net.socket import DrainSocket
from rlzmq.roles.peer_link import MAX_MESSAGE_BYTES, package_version
from rlzmq.wire.codec import UnknownVersionError, WireError, kind_of
from rlzmq.wire.messages import Goodbye, Hello, Refused, decode_message
from rlzmq.wire.messages import encode_message as encode_reply

__all__ = ["RemoteLearnerListener"]

_log = logging.getLogger("rlzmq.driver")

_GOODBYE_MS = 2000  # until it has left a busy machine


class _BrokenConnection(ExitStatus):
    def __str__(self) -> str:
        return "broke its connection to the driver"


class _RemoteProcess:
    """Process interface of a remote learner. It ends with its connection, and is killed by a message."""

    pid = -1  # on another machine, so it cannot be looked up here

    def __init__(self, door: RemoteLearnerListener, routing: bytes) -> None:
        self.exited: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self.is_stopping = False
        self._door = door
        self._routing = routing

    def lost(self) -> None:
        if not self.exited.done():
            self.exited.set_result(_BrokenConnection(None))

    def kill(self) -> None:
        if not self.exited.done():
            self._door.send(self._routing, encode_message(Shutdown(NO_CALL_ID)))
            self.lost()

    def close(self) -> None:
        self._door.forget(self._routing)

    def signal(self, number: int) -> None:
        """Do nothing: signals do not reach other machines."""


class _RemoteLink(ProcessLink):
    async def stop(self, timeout_s: float = 5.0) -> ExitStatus:
        child: Any = self._child
        child.is_stopping = True
        return await super().stop(timeout_s)

    async def apply(self, function: object, args: object, kwargs: Any) -> Any:
        raise ConfigurationError(
            f"{getattr(function, '__name__', 'a function')} cannot run in {self.role}: functions cannot be sent to "
            "other machines. Add it to the Learner class, or use local learners."
        )


class RemoteLearnerListener:
    """Listens for learners and returns them as actors.

    Args:
        config: Uses `listen` and `advertise`: control on its port + 2, the store on its port + 3.
        keys: The run's keys.
        spaces: (observation space, action space) of one env.

    Attributes:
        control_address, store_address: Addresses at which the learners reach them.
    """

    control_address: str
    store_address: str

    def __init__(self, config: BaseConfig, keys: JoinKeys, spaces: tuple[Any, Any]) -> None:
        self._config = config
        self._keys = keys
        self._spaces = [space_to_plain(space) for space in spaces]
        self._context: Context | None = None
        self._authenticator: Authenticator | None = None
        self._store: StoreServer | None = None
        self._waiting: dict[bytes, Hello] = {}
        self._came = asyncio.Event()
        self._links: dict[bytes, _RemoteLink] = {}
        self.control_address = self.store_address = ""

    async def start(self) -> None:
        """Start to listen.

        Raises:
            ConfigurationError: An address is in use.
        """
        assert self._config.listen is not None  # remote learners need it
        host, port = split_tcp(self._config.listen)
        self._context = Context()
        self._authenticator = Authenticator(self._context, {self._keys.clients["learner"].public: "learner"})
        self._socket = DrainSocket(
            self._context,
            "ROUTER",
            self._on_message,
            options=SocketOptions(
                max_message_bytes=MAX_MESSAGE_BYTES,
                linger_ms=_GOODBYE_MS,
            ),
            curve=self._keys.curve,
            on_event=self._on_event,
            on_cut=lambda address, _, reason, __: _log.error(
                "the connection of a learner at %s was cut: %s", address, reason
            ),
            packs=True,
            name="learner door",
        )
        control = self._socket.bind(self._keys.former("control", tcp_address(host, port + 2 if port else 0)))
        self._store = StoreServer(host, port + 3 if port else 0)
        self.control_address = at_host(control, self._config.advertise)
        self.store_address = at_host(tcp_address(host, self._store.port), self._config.advertise)

    async def take(self, config: BaseConfig, rank: int, *, replaces: bool = False) -> Any:
        """Wait for the next learner to join; return it, built for a rank.

        Args:
            config: The run's config.
            rank: Rank of the learner.
            replaces: Whether this rank has died. If so, and no spare is waiting, log a warning.

        Returns:
            An ActorHandle of a `LearnerRole`.

        Raises:
            DeadlineError: Building its Learner took longer than `process_start_timeout_s`.
            Exception: An error raised in the learner's process while building its Learner.
        """
        if replaces and not self._waiting:
            _log.warning("learner-%d is replaced by the next learner that joins; no spare waits now.", rank)
        while True:
            try:
                return await self._take_next(config, rank)
            except ActorLostError as error:  # it was not used yet, so any other one will do
                _log.warning("learner-%d left while it was being built: %s", rank, error)

    async def _take_next(self, config: BaseConfig, rank: int) -> object:
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        # Prefer the rank that a scheduler assigned, then the order of arrival.
        routing = min(self._waiting, key=lambda waiting: abs(self._waiting[waiting].rank - rank))
        hello = self._waiting.pop(routing)
        process: Any = _RemoteProcess(self, routing)
        link = _RemoteLink(
            process,
            f"learner-{rank}",
            "LearnerRole",
            "",
            lambda frames: self.send(routing, frames, must=True),
        )
        self._links[routing] = link
        handle = ActorHandle(link, LEARNER_ROLE)
        _log.info("%s is %s", handle.name, hello.name)
        num_ranks = max(config.num_learners, 1)
        timeout_s = config.process_start_timeout_s
        try:
            async with asyncio.timeout(timeout_s or None) as scope:
                await link.call("build", (pack_config(config), self._spaces, rank, num_ranks), {})
        except TimeoutError as error:
            if not scope.expired():
                raise
            handle.kill()
            raise DeadlineError(
                f"{handle.name} ({hello.name}) was not built within {timeout_s:g} s. If it really takes longer, raise "
                "process_start_timeout_s (config.fault_tolerance)."
            ) from error
        link.has_started = True
        return handle

    def send(self, routing: bytes, frames: list[Any], *, must: bool = False) -> None:
        """Send to one learner; with `must`, raise PeerLostError if it is unreachable."""
        try:
            self._socket.send([routing, *frames])
        except PeerLostError:
            self._lost(routing)
            if must:
                raise

    def forget(self, routing: bytes) -> None:
        """Ignore all further messages from this peer."""
        self._links.pop(routing, None)

    async def close(self) -> None:
        """Stop listening and release the remaining learners: spares, and those being built. Idempotent."""
        if self._context is None:
            return
        for routing in [*self._waiting, *self._links]:
            self.send(routing, encode_reply(Goodbye("the run has ended")))
        context, self._context = self._context, None
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close()
        try:
            await context.aclose()
        finally:
            if self._store is not None:
                self._store.close()

    def _on_message(self, frames: list[Any]) -> None:
        routing = bytes(frames[0])
        link = self._links.get(routing)
        try:
            if link is not None:
                if kind_of(frames[1:]) < 128:
                    return  # a HELLO that crossed our first call
                link.on_message(*decode_answer(frames[1:]))
                return
            message, _ = decode_message(frames[1:])
        except (WireError, ProtocolError) as error:
            _log.warning("refused a message from a learner: %s", error)
            if isinstance(error, UnknownVersionError):  # the peer can read this answer at least
                self.send(routing, encode_reply(Refused("version", str(error)[:1000])))
            self._lost(routing)  # otherwise a waiter for this message would never return
            return
        if isinstance(message, Hello) and message.role == "learner":
            ours = package_version()
            if message.package_version != ours:
                detail = f"the run uses rlzmq {ours}, the learner rlzmq {message.package_version[:60]}"
                _log.warning("%s was refused: %s", message.name[:200], detail)
                self.send(routing, encode_reply(Refused("package_version", detail)))
                return
            self._waiting[routing] = message
            self._came.set()

    def _on_event(self, event: SocketEvent) -> None:
        if event.kind == "disconnected":
            self._probe()
            # The event may precede the socket's own state change.
            asyncio.get_running_loop().call_later(2 * TICK_S, self._probe)

    def _probe(self) -> None:
        """Find peers that are no longer connected."""
        if self._context is None:
            return
        for routing in [*self._links, *self._waiting]:
            self.send(routing, encode_message(Cancel(NO_CALL_ID)))

    def _lost(self, routing: bytes) -> None:
        self._waiting.pop(routing, None)
        link = self._links.get(routing)
        if link is not None:
            child: Any = link._child
            if not child.exited.done() and not child.is_stopping:
                _log.warning("%s is lost: its connection broke", link.role)
            child.lost()
