"""A link ends with an error in its role's code; stages of other hosts get the driver's clock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import Context
from rlzmq.net.socket import DrainSocket
from rlzmq.roles import peer_link
from rlzmq.roles.peer_link import PeerLink, add_to_trace
from rlzmq.wire.codec import WireError
from rlzmq.wire.messages import Goodbye, TraceEvents, decode_message
from rlzmq.wire.payloads import pack_blob


class FailingCore:
    """Fails in its n-th tick, or gives its link an instruction that fails."""

    name, uuid = "runner-0", "u"

    def __init__(self, place: str) -> None:
        self.place = place
        self.num_ticks = 0

    def start(self, now: float) -> list[Any]:
        return []

    def tick(self, now: float) -> list[Any]:
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


def test_stages_of_another_host_are_placed_by_the_wall_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[tuple[str, float]] = []
    monkeypatch.setattr(
        peer_link.trace, "add_events", lambda source, events, offset_s: added.append((source, offset_s))
    )
    clock = SimpleNamespace(perf_counter=lambda: 100.0, time=lambda: 1100.0)
    monkeypatch.setattr(peer_link, "time", clock)
    blob = pack_blob({"events": [], "offset_s": 1000.0 - 400.0})  # its clock is 400 s ahead
    add_to_trace(TraceEvents("uuid"), (blob,))
    assert added == [("uuid", -400.0)]
    with pytest.raises(WireError):
        add_to_trace(TraceEvents("uuid"), ())
