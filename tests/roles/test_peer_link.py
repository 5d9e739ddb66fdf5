"""A link ends with an error in its role's code; clocks of other hosts, and what their stages may cost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.core import trace
from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import Context
from rlzmq.net.socket import DrainSocket
from rlzmq.roles import peer_link
from rlzmq.roles.peer_link import PeerLink, RemoteTrace
from rlzmq.wire.messages import Goodbye, TraceClock, TraceEvents, decode_message
from rlzmq.wire.payloads import unpack_blob


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


OFFSET_S = -400.0  # the driver's clock minus the runner's


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    trace.close()


class Runner:
    """A process on a clock that the test moves; its messages take the given times there and back."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(peer_link, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.sent: list[tuple[TraceEvents, Sequence[Any]]] = []
        trace.join(tmp_path / "elsewhere.json", "runner")
        self.trace = RemoteTrace(lambda message, payload: self.sent.append((message, payload)))

    def answer(self, there_s: float = 0.001, back_s: float = 0.001) -> None:
        message, _ = self.sent[-1]
        driver_now = self.now + there_s + OFFSET_S
        self.now += there_s + back_s
        self.trace.on_clock(TraceClock("uuid", message.sent_s, driver_now))


def test_the_offset_is_that_of_the_shortest_round_trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(tmp_path, monkeypatch)
    trace.span("env", 1000.0, 1000.5)
    runner.trace.tick()
    for number in range(16):
        assert len(runner.sent) == number + 1, "the exchanges follow each other at once"
        assert runner.sent[-1][1] == (), "no stage is sent before the offset is known"
        runner.answer(*((0.0004, 0.0006) if number == 5 else (0.002, 0.2)))
    runner.now += 0.3
    runner.trace.tick()
    (blob,) = runner.sent[-1][1]
    events = unpack_blob(blob)
    assert events["offset_s"] == pytest.approx(OFFSET_S, abs=0.0005)
    assert events["events"] == [["X", "env", 1000.0, 0.5, 0, {}]]
