"""The wire interface of a policy server: the same requests as over HTTP, as arrays over ZeroMQ."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.socket_directory import SocketDirectory
from rlzmq.deploy.batcher import Batcher, OverloadedError
from rlzmq.deploy.policy_messages import (
    CLIENT_ROLE,
    ENDING,
    Act,
    Actions,
    Describe,
    Description,
    Failure,
    PolicyMessage,
    decode_message,
    encode_message,
)
from rlzmq.deploy.request_rows import RequestError
from rlzmq.deploy.serve_metrics import ServeMetrics
from rlzmq.deploy.served_checkpoint import ServedCheckpoint
from rlzmq.deploy.served_policy import Arrays, ServedPolicy
from rlzmq.net.authenticator import Authenticator
from rlzmq.net.context import Context
from rlzmq.net.join_file import JoinFile
from rlzmq.net.keys import CurveServer, KeyPair
from rlzmq.net.options import CONTROL, SocketOptions
from rlzmq.net.socket import DrainSocket, Frame, SendTicket
from rlzmq.wire.values import pack_value

__all__ = ["MAX_MESSAGE_BYTES", "ON_THIS_MACHINE", "WireInterface"]

_log = logging.getLogger("rlzmq.serve")

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of an array in a request or an answer."""

ON_THIS_MACHINE = "ipc"
"""Address of a socket in a private directory of this user."""

_LINGER_MS = 1000
# Maximum number of unread bytes per client; further requests of that client are ignored.
_MAX_UNREAD_BYTES = 64 << 20
_MESSAGE_BYTES = 512  # size of an answer without its arrays, here and in libzmq
# A ticket for every answer would cost as much as sending the answer.
_ANSWERS_PER_TICKET = 16
_BYTES_PER_TICKET = 1 << 20


@dataclass(slots=True)
class _Unread:
    """Answers that a client may not have read yet."""

    tickets: deque[tuple[SendTicket, int]] = field(default_factory=deque)
    num_bytes: int = 0
    tail_answers: int = 0
    tail_bytes: int = 0


class _Request(NamedTuple):
    """Where an answer goes: the client's routing id, its number for the request, and when that arrived."""

    client: bytes
    request_id: int
    arrived: float


class WireInterface:
    """Answers requests over ZeroMQ, on the running event loop."""

    def __init__(
        self, batcher: Batcher, served: Callable[[], ServedCheckpoint], metrics: ServeMetrics
    ) -> None:
        self._batcher = batcher
        self._served = served
        self._metrics = metrics
        self._is_ending = False
        self._unread: dict[bytes, _Unread] = {}
        self._context: Context | None = None
        self._directory: SocketDirectory | None = None
        self._authenticator: Authenticator | None = None

    def start(self, address: str, server: KeyPair, client: KeyPair) -> JoinFile:
        """Start to listen.

        Args:
            address: ``"ipc"``: only for this user on this machine, without keys; ``tcp://HOST:PORT``: with keys.
            server: The server's key pair.
            client: The clients' key pair.

        Returns:
            The data that a client needs to connect.

        Raises:
            ConfigurationError: The address is malformed, taken, or a wildcard.
        """
        self._context = Context()
        is_local = address == ON_THIS_MACHINE
        if is_local:
            self._directory = SocketDirectory()
            address = self._directory.address("policy")
        else:
            self._authenticator = Authenticator(self._context, {client.public: CLIENT_ROLE})
        self._socket = DrainSocket(
            self._context,
            "ROUTER",
            self._on_message,
            options=SocketOptions(
                max_message_bytes=MAX_MESSAGE_BYTES,
                receive_high_water_mark=0,  # messages are read at once, and refused if too many wait
                linger_ms=_LINGER_MS,
                heartbeat_interval_ms=0 if is_local else CONTROL.heartbeat_interval_ms,
            ),
            curve=None if is_local else CurveServer(server),
            name="policy server",
        )
        bound = self._socket.bind(address)
        keys = () if is_local else (server.public, client.secret)
        return JoinFile(CLIENT_ROLE, {"policy": bound}, *keys)

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, answer those that have arrived, and close. Idempotent.

        Args:
            timeout_s: Seconds after which unanswered requests are abandoned.
        """
        self._is_ending = True
        await self._batcher.wait_until_idle(timeout_s)
        if self._context is not None:
            self._socket.close()  # answers already sent are still delivered
            if self._authenticator is not None:
                await asyncio.to_thread(self._authenticator.close)
            await asyncio.to_thread(self._context.close)
            self._context = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    # -- requests -------------------------------------------------------------------------------

    def _on_message(self, frames: list[Frame]) -> None:
        arrived = time.perf_counter()
        client = bytes(frames[0])
        if self._is_unread(client):
            return
        try:
            request_id, message, arrays = decode_message(frames[1:])
        except ProtocolError as error:
            _log.warning("refused a message of a client: %s", error)
            return
        request = _Request(client, request_id, arrived)
        if isinstance(message, Act):
            self._act(request, message, arrays)
        elif isinstance(message, Describe):
            self._describe(request)
        else:
            _log.warning("refused a message of a client: %s is for clients", type(message).__name__)

    def _act(self, request: _Request, message: Act, arrays: Sequence[npt.NDArray[Any]]) -> None:
        if self._is_ending:
            self._fail(request, ENDING, "the server ends")
            return
        try:
            served = self._served()
            policy = served.choose(message.module_id, message.agent_id)
            inputs = _inputs(policy, message, arrays)
            on_done = functools.partial(self._answer, request, served.name)
            self._batcher.submit(policy, inputs, explore=message.explore, on_done=on_done)
        except RequestError as error:
            self._fail(request, 400, str(error))
        except KeyError as error:
            self._fail(request, 404, str(error.args[0]))
        except OverloadedError as error:
            self._fail(request, 503, str(error))

    def _answer(self, request: _Request, checkpoint: str, answer: Arrays | Exception) -> None:
        if isinstance(answer, RequestError):
            self._fail(request, 400, str(answer))
        elif isinstance(answer, Exception):
            self._fail(request, 500, f"the policy raised {type(answer).__name__}; the server's log says more")
        else:
            self._metrics.answered("wire", 200, time.perf_counter() - request.arrived)
            self._send(request, Actions(checkpoint), answer)

    def _describe(self, request: _Request) -> None:
        about = [
            {
                "module_id": policy.module_id,
                "agent_id": policy.agent_id,
                "observation_space": policy.observation_space,
                "action_space": policy.action_space,
                "states": [port.name.partition(".")[2] for port in policy.states],
                "reads_rewards": policy.reads_rewards,
            }
            for policy in self._served().policies
        ]
        self._send(request, Description(), pack_value(about))

    def _fail(self, request: _Request, code: int, detail: str) -> None:
        self._metrics.answered("wire", code, time.perf_counter() - request.arrived)
        self._send(request, Failure(code, detail[:1000]), [])

    # -- answers --------------------------------------------------------------------------------

    def _send(self, request: _Request, message: PolicyMessage, arrays: Arrays) -> None:
        client = request.client
        unread = self._unread.get(client)
        if unread is None:
            unread = self._unread[client] = _Unread()
        unread.tail_answers += 1
        unread.tail_bytes += sum([array.nbytes for array in arrays]) + _MESSAGE_BYTES
        ticket = None
        if unread.tail_answers >= _ANSWERS_PER_TICKET or unread.tail_bytes >= _BYTES_PER_TICKET:
            ticket = SendTicket()
            unread.tickets.append((ticket, unread.tail_bytes))
            unread.num_bytes += unread.tail_bytes
            unread.tail_answers = unread.tail_bytes = 0
        try:
            self._socket.send([client, *encode_message(request.request_id, message, arrays)], ticket)
        except PeerLostError:  # the client left before its answer
            self._unread.pop(client, None)
        except ProtocolError as error:
            _log.warning("cannot send an answer: %s", error)
            if not isinstance(message, Failure):
                self._send(request, Failure(500, "the answer is too large"), [])

    def _is_unread(self, client: bytes) -> bool:
        """Return whether a client has too many unread answers."""
        unread = self._unread.get(client)
        if unread is None:
            return False
        while unread.tickets and unread.tickets[0][0].done:
            unread.num_bytes -= unread.tickets.popleft()[1]
        return unread.num_bytes > _MAX_UNREAD_BYTES


def _inputs(policy: ServedPolicy, message: Act, arrays: Sequence[npt.NDArray[Any]]) -> Arrays:
    num_observations, num_states = len(policy.observations), len(policy.states)
    expected = num_observations + message.has_rewards + num_states * message.has_state
    if len(arrays) != expected:
        raise RequestError(f"expected {expected} arrays, got {len(arrays)}")
    if not all(array.ndim for array in arrays):
        raise RequestError("expected arrays [N, ...], got one without a batch axis")
    arrays = list(arrays)
    rewards = arrays[num_observations] if message.has_rewards and policy.reads_rewards else None
    state = arrays[expected - num_states :] if message.has_state else None
    return policy.inputs_of(arrays[:num_observations], rewards, state)
