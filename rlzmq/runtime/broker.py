"""The broker role: leases out, fragments in, exact shards to learners, weights to everyone.

(first version, see the protocol package for every decision)
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

from rlzmq.core.errors import PeerLostError
from rlzmq.net.context import Context
from rlzmq.net.options import SocketOptions
from rlzmq.net.run_directory import RunDirectory
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.broker_core import BrokerCore
from rlzmq.protocol.broker_state import BrokerOptions
from rlzmq.protocol.errors import WireError
from rlzmq.protocol.events import Malformed, PeerLost, Publish, Received, Send, Tick
from rlzmq.protocol.messages import decode_message

__all__ = ["BrokerRole"]


class BrokerRole:
    def __init__(self, run_id: str, options: dict[str, Any] | None = None) -> None:
        self._core = BrokerCore(BrokerOptions(run_id=run_id, incarnation=int(time.time() * 1000), **(options or {})))

    async def start(self) -> dict[str, str]:
        self._loop = asyncio.get_running_loop()
        self._directory = RunDirectory()
        self._context = Context()
        options = SocketOptions(max_message_bytes=1 << 30, linger_ms=500, max_queued_bytes=1 << 30)
        self._data = DrainSocket(self._context, "ROUTER", self._on_message, options=options, name="broker")
        self._weights = DrainSocket(self._context, "PUB", None, options=options, name="broker weights")
        addresses = {
            "data": self._data.bind(self._directory.address("data")),
            "weights": self._weights.bind(self._directory.address("weights")),
        }
        self._tick()
        return addresses

    def _tick(self) -> None:
        self._do(self._core.handle(Tick(), self._loop.time()))
        self._timer = self._loop.call_later(0.05, self._tick)

    def _on_message(self, frames: list[Any]) -> None:
        peer = bytes(frames[0])
        now = self._loop.time()
        try:
            message, _ = decode_message(frames[1:])
        except WireError as error:
            self._do(self._core.handle(Malformed(peer, error.reason, str(error)), now))
            return
        self._do(self._core.handle(Received(peer, message, tuple(frames[1:])), now))

    def _do(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                try:
                    self._data.send([instruction.peer, *instruction.frames])
                except PeerLostError:
                    self._do(self._core.handle(PeerLost(instruction.peer), self._loop.time()))
            elif isinstance(instruction, Publish):
                self._weights.send([instruction.frame])

    async def status(self) -> dict[str, Any]:
        return self._core.status()

    async def stop(self) -> None:
        self._timer.cancel()
        self._do(self._core.stop("stopped"))
        self._data.close()
        self._weights.close()
        await asyncio.to_thread(self._context.close)
        self._directory.close()
