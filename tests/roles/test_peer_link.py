"""An error in a role's own code ends its link, and so its run: nobody would notice a callback that raised."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.core.socket_directory import SocketDirectory
from rlzmq.protocol.events import Tick
from rlzmq.roles.peer_link import PeerLink


class FailingCore:
    """Fails in its n-th tick, or gives its link an instruction that fails."""

    name, uuid = "runner-0", "u"

    def __init__(self, place: str) -> None:
        self.place = place
        self.num_ticks = 0

    def start(self, now: float) -> list[Any]:
        return []

    def handle(self, event: Any, now: float) -> list[Any]:
        assert isinstance(event, Tick)
        self.num_ticks += 1
        if self.num_ticks < 3:
            return []
        if self.place == "core":
            raise ZeroDivisionError("in the core")
        return [SimpleNamespace()]


class FailingLink(PeerLink):
    def act(self, instruction: Any) -> None:
        if self.core.place == "act":
            raise KeyError("in an instruction")
        job: asyncio.Future[None] = self._loop.create_future()
        self.when_done(job, self._finish)
        job.set_result(None)

    def _finish(self, done: Any) -> None:
        raise ValueError("after a job")


@pytest.mark.parametrize(
    ("place", "kind"), [("core", ZeroDivisionError), ("act", KeyError), ("job", ValueError)]
)
async def test_an_error_of_a_link_ends_it(place: str, kind: type[Exception]) -> None:
    with SocketDirectory() as directory:
        link = FailingLink(FailingCore(place), directory.address("data"))
        await link.start()
        with pytest.raises(kind):
            async with asyncio.timeout(30):
                await link.ended
        await link.close()
