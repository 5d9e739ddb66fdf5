"""An external learner that joins a run by itself, from another terminal or machine.

HELLO, until the driver's first call ──► build ──► LearnerRole's methods, called by the driver
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable
from typing import Any

from rlzmq.actors.host import ActorHost, CallServer
from rlzmq.actors.messages import NO_CALL_ID, Call, Cancel, Shutdown, decode_message, pack
from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.process import share_one_arena
from rlzmq.core.space_plain import space_from_plain
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.events import SocketEvent
from rlzmq.net.join_file import JoinFile
from rlzmq.net.socket import DrainSocket
from rlzmq.roles.learner.learner_role import LearnerRole
from rlzmq.roles.peer_link import MAX_MESSAGE_BYTES, new_peer_id, package_version
from rlzmq.wire.codec import kind_of
from rlzmq.wire.errors import WireError
from rlzmq.wire.messages import Goodbye, Hello, Refused
from rlzmq.wire.messages import decode_message as decode_hello
from rlzmq.wire.messages import encode_message as encode_hello

__all__ = ["RemoteLearner"]

# The only methods that the driver may call: other methods of LearnerRole take functions.
_METHODS = frozenset(
    {
        "",
        "connect",
        "disconnect",
        "form",
        "get_inference_weights",
        "get_state",
        "join_group",
        "ping",
        "rejoin",
        "run_until_failure",
        "set_state",
        "update",
    }
)
_HELLO_S = 1.0
_LAST_WORDS_S = 0.1  # the driver's last messages may still wait in the socket


class RemoteLearner:
    """One external learner; the driver assigns its rank.

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
                await asyncio.wait((self._over,), timeout=_HELLO_S)
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

    async def _build(self, packed: Any, spaces: Any, rank: int, num_ranks: int) -> None:
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
