"""Requests to a broker by processes outside of the run: fetching the config, and observing the status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Self

from rlzmq.core.errors import AuthenticationError, PeerLostError
from rlzmq.core.patience import HEARTBEAT_S, NARROW_PATH, Retries
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.events import SocketEvent
from rlzmq.net.keys import JoinFile
from rlzmq.net.socket import DrainSocket
from rlzmq.roles.peer_link import MAX_MESSAGE_BYTES, new_peer_id
from rlzmq.wire.codec import UnknownVersionError, WireError, WireMessage
from rlzmq.wire.messages import (
    Config,
    ConfigRequest,
    Goodbye,
    Hello,
    Refused,
    Status,
    StatusRequest,
    Welcome,
    decode_message,
    encode_message,
)
from rlzmq.wire.payloads import unpack_blob

__all__ = ["Conversation", "Observer", "fetch_config"]

_log = logging.getLogger("rlzmq")

# Handshakes that fail without a status: a server with another key, or one that is being restarted.
_MAX_REFUSALS = 3
# Connections without an answer that indicate a path that loses large messages.
_MAX_CONNECTIONS = 4
_NO_ANSWER = "nothing answers there"
_ZAP_REFUSED = 400  # status: the key is refused


class Conversation:
    """Requests and answers exchanged with a broker outside of a role's link; an async context manager.

    Args:
        address: The broker's data address.
        join: The join file with the keys to use; None over ipc.
    """

    def __init__(self, address: str, join: JoinFile | None) -> None:
        self._address = address
        self._join = join
        self._curve = join.curve() if join is not None else None
        self._context: Context | None = None
        self._received: asyncio.Queue[tuple[WireMessage, Sequence[Any]]] = asyncio.Queue()
        self._num_refusals = 0
        self._reason = _NO_ANSWER
        self._refused = asyncio.Event()
        self._other_version = ""
        self._lacks_driver = False
        self._connections = Retries(_MAX_CONNECTIONS)
        self._is_narrow = False

    async def __aenter__(self) -> Self:
        self._context = Context()
        options = SocketOptions(max_message_bytes=MAX_MESSAGE_BYTES, reconnect_interval_max_ms=500)
        self._socket = DrainSocket(
            self._context,
            "DEALER",
            self._on_message,
            options=options,
            routing_id=f"asks.{new_peer_id()}".encode(),
            curve=self._curve,
            on_event=self._on_event,
            packs=True,
            name="conversation",
        )
        self._socket.connect(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close(100)
        assert self._context is not None
        await self._context.aclose()

    def tell(self, message: WireMessage) -> None:
        """Send without waiting."""
        self._socket.send(encode_message(message))

    async def ask(
        self,
        message: WireMessage,
        answer: type[WireMessage] | tuple[type[WireMessage], ...],
        *,
        timeout_s: float,
    ) -> tuple[Any, Sequence[Any]]:
        """Send a message repeatedly until an answer of this type arrives; return (message, payload frames).

        A broker without a driver is asked until the timeout.

        Raises:
            PeerLostError: No answer arrived in time.
            AuthenticationError: The broker refuses the key, or has another key than expected.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self.tell(message)
        while True:
            wait_s = min(HEARTBEAT_S, deadline - loop.time())
            if wait_s <= 0 and self._lacks_driver:
                raise PeerLostError(
                    f"the broker at {self._address} accepts this key, but no driver has connected yet "
                    f"(waited {timeout_s:g} s): start the run that is to use it"
                )
            if wait_s <= 0:
                raise PeerLostError(f"no broker at {self._address} within {timeout_s:g} s: {self._reason}")
            if self._other_version:
                raise PeerLostError(
                    f"the broker at {self._address} is of another version: {self._other_version}"
                )
            if self._refused.is_set():
                raise AuthenticationError(
                    f"the broker at {self._address} refuses this key: {self._reason}. Join files are made "
                    "for one run; take the one of the run that is there now."
                )
            try:
                async with asyncio.timeout(wait_s):
                    received, payload = await self._received.get()
            except TimeoutError:
                self.tell(message)
                continue
            if isinstance(received, answer):
                return received, payload
            if isinstance(received, Refused) and received.reason == "no_driver":
                self._lacks_driver = True
            elif isinstance(received, Refused) and received.reason != "unknown_peer":
                raise AuthenticationError(f"the broker refuses: {received.reason}, {received.detail}")

    def _on_message(self, frames: list[Any]) -> None:
        try:
            message, payload = decode_message(frames)
        except WireError as error:
            self._reason = f"its answer cannot be read: {error}"
            if isinstance(error, UnknownVersionError):
                self._other_version = str(error)
            return
        self._connections.passed(self)
        self._received.put_nowait((message, payload))

    def _on_event(self, event: SocketEvent) -> None:
        if event.kind == "retrying" and self._reason == _NO_ANSWER and self._join is not None:
            self._reason = self._join.absence("data")
            _log.warning("%s. Waiting for it.", self._reason)
        if event.kind == "connected":
            self._reason = "the key is accepted, and no answer arrives"
            if self._connections.try_again(self):
                self._is_narrow = True
                _log.warning("%s: %s", self._address, NARROW_PATH)
        if self._is_narrow:
            self._reason = NARROW_PATH
        if event.kind == "handshake_failed":
            self._reason = event.reason
            self._num_refusals += _MAX_REFUSALS if event.code == _ZAP_REFUSED else 1
            if self._num_refusals >= _MAX_REFUSALS:
                self._refused.set()


async def fetch_config(join: JoinFile, *, timeout_s: float) -> tuple[str, bytes]:
    """Return the run's id and its config frame (see `joining.unpack_config`).

    Raises:
        PeerLostError: No broker, or it has no config yet, within `timeout_s` seconds.
        AuthenticationError: The key is refused.
    """
    async with Conversation(join.addresses["data"], join) as conversation:
        config, payload = await conversation.ask(ConfigRequest(), Config, timeout_s=timeout_s)
        if not payload:
            raise PeerLostError(f"the broker at {join.addresses['data']} sent an empty config")
        return config.run_id, bytes(payload[0])


class Observer(Conversation):
    """A peer that only requests a broker's status."""

    def __init__(self, address: str, join: JoinFile | None = None) -> None:
        super().__init__(address, join)
        self._peer_id = new_peer_id()
        self._num_hellos = 0

    async def status(self, *, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return `BrokerCore.status` with statistics of the broker's event loop and connections.

        Args:
            timeout_s: Timeout in seconds, which includes a restart of the broker.

        Raises:
            PeerLostError: No answer arrived in time.
            AuthenticationError: The key is refused.
        """
        if not self._num_hellos:
            await self._register(timeout_s)
        try:
            _, payload = await self.ask(StatusRequest(), Status, timeout_s=min(timeout_s, 1.0))
        except PeerLostError:  # the broker was restarted and does not know this peer
            await self._register(timeout_s)
            _, payload = await self.ask(StatusRequest(), Status, timeout_s=timeout_s)
        return dict(unpack_blob(payload[0]))

    async def _register(self, timeout_s: float) -> None:
        self._num_hellos += 1
        hello = Hello("observer", f"observer-{self._peer_id[:8]}", self._peer_id, hello_id=self._num_hellos)
        await self.ask(hello, Welcome, timeout_s=timeout_s)

    async def __aexit__(self, *error: object) -> None:
        self.tell(Goodbye("done"))
        await super().__aexit__(*error)
