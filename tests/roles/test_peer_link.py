"""A link ends with an error in its role's code, and says goodbye; runners of one host share the broker's weights."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq.core.addresses import SocketDirectory
from rlzmq.core.errors import ProtocolError
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.keys import CurveClient, KeyPair
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.core import Send
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.roles.listeners import MAX_REMOTE_MESSAGE_BYTES
from rlzmq.roles.neighbors import Neighbors
from rlzmq.roles.peer_link import PeerLink
from rlzmq.wire.codec import new_publication_buffer, notice_of, open_publication, seal_publication
from rlzmq.wire.messages import Goodbye, SnapshotRequest, decode_message
from tests.support.runs import until_async


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


async def test_what_the_broker_would_cut_an_external_peer_for_is_not_sent() -> None:
    keys = KeyPair.generate(), KeyPair.generate()
    core = FailingCore("")
    link = FailingLink(core, "tcp://127.0.0.1:9", CurveClient(keys[0].public, keys[1]))
    core.work = lambda: None
    await link.start()
    for num_bytes in (MAX_REMOTE_MESSAGE_BYTES, MAX_REMOTE_MESSAGE_BYTES - 1000):  # parts have heads
        with pytest.raises(ProtocolError, match="runner-0"):
            link.do([Send(b"", SnapshotRequest(0, 0), whole=(b"header", np.zeros(num_bytes, np.uint8)))])
    await link.close()


_OPTIONS = SocketOptions(max_message_bytes=1 << 20, reconnect_interval_max_ms=100)


@pytest.fixture(autouse=True)
def a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class Runner:
    """A runner of run "run" as its neighbors see it; ``asked``: its requests to the broker, ``got``: versions."""

    def __init__(self, context: Context, name: str) -> None:
        self.asked, self.got = list[SnapshotRequest](), list[int]()
        self.core = RunnerCore("run", name, name, sample=lambda *_: None, num_envs=1)
        self.neighbors = Neighbors(
            self.core,
            context,
            _OPTIONS,
            ask=self.asked.append,
            want=self._want,
            take=lambda frame: self.got.append(open_publication(frame)[0].version),
        )

    def announce(self, frame: bytes) -> None:
        """The broker's notice arrives, as it does at a runner's link; the runner needs the weights."""
        notice = notice_of(open_publication(frame)[0])
        self.core.take_weights(notice, 0.0)
        self.neighbors.offer(notice)
        self._want(SnapshotRequest(0, self.got[-1] if self.got else 0))

    def _want(self, request: SnapshotRequest) -> None:
        for instruction in self.core.ask_for(request, 0.0):
            assert isinstance(instruction, Send)
            assert isinstance(instruction.message, SnapshotRequest)
            self.neighbors.request(instruction.message)


def weights(version: int) -> bytes:
    buffer = new_publication_buffer(400_000)
    seal_publication(buffer, run_id="run", generation=0, version=version, layout_digest="")
    return buffer.tobytes()


async def test_weights_are_asked_of_the_broker_once_and_reach_all(tmp_path: Path) -> None:
    context = Context()
    first, *others = runners = [Runner(context, f"runner-{number}") for number in range(4)]
    for version in (1, 2, 3):
        frame = weights(version)
        for runner in runners:
            runner.announce(frame)
        await until_async(lambda version=version: len(first.asked) >= version)
        first.neighbors.offer(frame)
        await until_async(lambda version=version: all(runner.got[-1:] == [version] for runner in others))
        assert len(first.asked) == version
    assert not any(runner.asked for runner in others)
    for runner in reversed(runners):
        runner.neighbors.close()
    assert not os.listdir(tmp_path)
    context.close()


async def test_the_next_runner_that_lacks_weights_takes_the_place_of_one_that_ended() -> None:
    context = Context()
    first, second, third = runners = [Runner(context, f"runner-{number}") for number in range(3)]
    for runner in runners:
        runner.neighbors.request(SnapshotRequest(0, 0))
    first.neighbors.close()
    second.neighbors.request(SnapshotRequest(0, 0))
    assert second.asked == [SnapshotRequest(0, 0)]
    second.neighbors.offer(weights(1))
    # as the core repeats it
    await until_async(lambda: third.got or third.neighbors.request(SnapshotRequest(0, 0)))
    for runner in (third, second):
        runner.neighbors.close()
    context.close()


async def test_a_neighbor_that_the_broker_does_not_know_is_passed_over() -> None:
    context = Context()
    first, second = (Runner(context, f"runner-{number}") for number in range(2))
    first.neighbors.request(SnapshotRequest(0, 0))
    await until_async(lambda: second.asked or second.neighbors.request(SnapshotRequest(0, 0)))
    assert second.asked == [SnapshotRequest(0, 0)]
    second.neighbors.close()
    first.neighbors.close()
    context.close()
