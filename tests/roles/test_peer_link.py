"""A link ends with an error in its role's code, and says goodbye whatever its peer does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import Context
from rlzmq.net.socket import DrainSocket
from rlzmq.roles.peer_link import PeerLink
from rlzmq.wire.messages import Goodbye, decode_message


class FailingCore:
    """Fails in its n-th tick, or gives its link an instruction that fails."""

    name, uuid = "runner-0", "u"

    def __init__(self, place: str) -> None:
        self.place = place
        self.work: Any = None
        self.num_ticks = 0

    def start(self, now: float) -> list[Any]:
        return []

    def tick(self, now: float) -> list[Any]:
        self.num_ticks += 1
        if self.num_ticks < 3:
            return []
        if self.place == "core":
            raise ZeroDivisionError("in the core")
        self.work()
        return []


class FailingLink(PeerLink):
    def work(self) -> None:
        if self.core.place == "work":
            raise KeyError("in the role's work")
        job: asyncio.Future[None] = self._loop.create_future()
        self.when_done(job, self._finish)
        job.set_result(None)

    def _finish(self, done: Any) -> None:
        raise ValueError("after a job")


@pytest.mark.parametrize(
    ("place", "kind"), [("core", ZeroDivisionError), ("work", KeyError), ("job", ValueError)]
)
async def test_an_error_of_a_link_ends_it(place: str, kind: type[Exception]) -> None:
    with SocketDirectory() as directory:
        link = FailingLink(FailingCore(place), directory.address("data"))
        link.core.work = link.work
        await link.start()
        with pytest.raises(kind):
            async with asyncio.timeout(30):
                await link.ended
        await link.close()


class BusyCore(FailingCore):
    """Cannot leave: its lease is still sampled."""

    is_stopped = is_welcome = False

    def tick(self, now: float, reason: str = "") -> list[Any]:
        return []

    leave = tick


async def test_a_peer_that_stops_during_a_lease_says_goodbye_nevertheless() -> None:
    received: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    with SocketDirectory() as directory, Context() as context:
        broker = DrainSocket(
            context, "ROUTER", lambda frames: received.set_result(decode_message(frames[1:])[0]), packs=True
        )
        link = FailingLink(BusyCore(""), broker.bind(directory.address("data")))
        try:
            await link.start()
        finally:
            await link.stop()
        async with asyncio.timeout(30):
            assert await received == Goodbye("before its last fragment was finished")
