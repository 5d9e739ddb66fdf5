"""Clocks of other hosts, and the bounds of what their stages may cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.core import trace
from rlzmq.roles import peer_link
from rlzmq.roles.peer_link import RemoteTrace
from rlzmq.wire.messages import TraceClock, TraceEvents
from rlzmq.wire.values import unpack_blob

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


def test_one_message_is_unanswered_and_a_lost_answer_costs_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(tmp_path, monkeypatch)
    runner.trace.tick()
    for _ in range(19):
        runner.now += 0.1
        runner.trace.tick()
    assert len(runner.sent) == 1
    runner.now += 0.1
    runner.trace.tick()
    assert len(runner.sent) == 2
    runner.trace.on_clock(TraceClock("uuid", 1000.0, 1.0))  # the first one's answer, late
    assert len(runner.sent) == 2
    runner.answer()
    for _ in range(15):
        runner.answer()
    num_sent = len(runner.sent)
    runner.now += 10.0
    runner.trace.tick()
    assert len(runner.sent) == num_sent, "nothing to send"
    for number in range(5000):
        trace.span("env", number, number + 0.5)
    runner.trace.tick()
    runner.trace.flush()
    assert [len(unpack_blob(payload[0])["events"]) for _, payload in runner.sent[num_sent:]] == [2000, 2000]
