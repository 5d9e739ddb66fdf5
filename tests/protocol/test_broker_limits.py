"""What one peer, a crowd from outside or time may do to a broker: bounded memory and cost, no foreign names."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.broker import registration
from rlzmq.protocol.core import Received
from rlzmq.protocol.driver_core import Report, parse_report
from rlzmq.wire.messages import (
    Accepted,
    CommitReport,
    DriverState,
    Hello,
    Notice,
    Refused,
    Rejected,
    RunnerState,
    Welcome,
)
from scripts.bench.broker_core import TERMS, World


@pytest.mark.parametrize("fields", [{"uuid": "u" * 201}, {"name": "n" * 201}])
def test_an_impossible_hello_is_refused(fields):
    bench = Bench()
    bench.hello("runner", "runner", num_envs=4, **fields)
    assert bench.sent("runner", Refused)[0].reason == "identity"
    assert not bench.state.runners


# ------------------------------------------------------------------ what it says


def test_a_fragment_under_another_name_leaves_no_trace():
    bench = bench_with_runner(batch=20)
    bench.runner("victim")
    for seq in range(9):
        bench.fragment(runner="runner", seq=seq, incarnation=2)
        assert bench.sent("runner", Rejected)[0].reason == "fenced"
    assert bench.state.ledger.accounting.sampled == 0
    assert list(bench.state.ledger.runners) == [("uuid-runner", 1), ("uuid-victim", 1)]
    bench.fragment(runner="runner", seq=9, incarnation=2)
    assert bench.sent("runner", Refused)[0].reason == "expelled"


@pytest.mark.parametrize("fields", [{"seq": 2**62}, {"steps": 2**62}, {"steps": -1}])
def test_an_impossible_number_leaves_no_trace(fields):
    bench = bench_with_runner(batch=20)
    bench.fragment(**fields)
    assert bench.sent("driver", Notice)[0].event == "protocol_error"
    (told, _offence) = bench.sent("runner", Rejected)
    assert (told.seq, told.reason) == (fields.get("seq", 0), "rejected")
    accounting = bench.state.ledger.accounting
    assert (accounting.sampled, sum(accounting.dropped.values())) == (0, 0)


def test_a_runner_cannot_be_done_with_what_it_never_sent():
    bench = bench_with_runner(batch=20)
    bench.send("runner", RunnerState(2**60, (), (), False, -1, 0))
    assert bench.sent("driver", Notice)[0].event == "protocol_error"
    assert bench.state.ledger.runner("uuid-runner", 1).watermark == 0


def test_what_is_held_is_not_refused_when_it_comes_again_whatever_the_memory():
    bench = Bench(window_bytes=1, memory_bytes=1, resent_bytes=1)
    bench.ready_run(batch=40)
    bench.runner()
    bench.fragment(bench.leases()[0].lease_id, seq=0)
    assert bench.sent("runner", Accepted)
    for changes in ({}, {"version": -1}):
        bench.fragment(seq=0, **changes)  # its ACCEPTED was lost
        assert bench.sent("runner", Rejected) == []
        assert bench.sent("runner", Accepted), "the runner keeps its copy"
    assert not bench.state.receipts.may_forget("uuid-runner", 1).is_committed(0)
    accounting = bench.state.ledger.accounting
    assert (accounting.sampled, accounting.pending, accounting.num_duplicates) == (20, 20, 2)


@pytest.mark.parametrize("bound", ["resent_bytes", "window_bytes", "memory_bytes"])
def test_without_leases_a_runner_fills_its_share_to_the_last_byte(bound):
    measured = Bench()
    measured.runner()
    measured.fragment(steps=1)
    options = {"resent_bytes": 0, "window_bytes": 0, "memory_bytes": 0}
    bench = Bench(**{**options, bound: 2 * measured.state.ledger.num_bytes})
    bench.runner()
    rejected = []
    for _ in range(3):
        bench.fragment(steps=1)
        rejected.append([item.reason for item in bench.sent("runner", Rejected)])
    assert rejected == [[], [], ["overrun"]]


def _report_of(bench: Bench) -> Report:
    """The report of the update whose shard plan is in the last output."""
    out = bench.done(bench.make_ready())
    (report,) = [item for item in out if isinstance(getattr(item, "message", None), CommitReport)]
    return parse_report(report.message, report.payload)


def test_a_runner_that_is_gone_for_long_is_forgotten_and_may_not_come_back():
    bench = Bench(forget_after_s=100.0)
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment()
    _report_of(bench)
    bench.weights(1)
    bench.send("driver", DriverState(-1, 1))
    bench.now = 20.0
    bench.tick()  # nobody was heard of since: all are lost
    assert not bench.state.runners
    bench.now = 125.0
    bench.tick()
    assert not bench.state.ledger.runners
    bench.runner()
    assert bench.sent("runner", Refused)[0].reason == "fenced"
    bench.driver(next_update=1)
    bench.learner(generation=2, next_update=1)
    bench.weights(1, generation=2)
    bench.open(1, batch=20)
    bench.runner("another")
    bench.fragment(bench.leases("another")[0].lease_id, runner="another", version=1, generation=2)
    report = _report_of(bench)
    assert list(report.forgotten) == [("uuid-runner", 1)]
    assert report.watermarks == {("uuid-another", 1): 1}


# ------------------------------------------------------------------ peers from outside


def _hello(bench: Bench, peer: str, number: int = 0, origin: str = "runner at 10.0.0.9", **fields) -> list:
    values = {"name": f"{peer}@host", "uuid": f"uuid-{peer}-{number}", "num_envs": 1, **fields}
    return bench.event(Received(peer.encode(), Hello("runner", **values), origin=origin))


def _num_records(bench: Bench) -> int:
    state = bench.state
    return max(len(state.names), len(state.hello_ids), len(state.ledger.runners))


def test_another_name_on_one_connection_is_an_offence_and_no_record():
    bench = Bench()
    _hello(bench, "a")
    for number in range(1, 10):
        _hello(bench, "a", number)
        assert bench.sent("a", Rejected)[0].reason == "identity"
        assert bench.sent("a", Welcome) == []
    assert _num_records(bench) == 1
    _hello(bench, "a", 10)
    assert bench.sent("a", Refused)[0].reason == "expelled"
    assert bench.state.refused == {"identity": 10}


@pytest.mark.parametrize("stays_connected", [True, False])
def test_ever_new_processes_are_let_in_up_to_a_number(monkeypatch, stays_connected):
    monkeypatch.setattr(registration, "_MAX_NEWCOMERS", 50)
    bench = Bench()
    for number in range(500):
        _hello(bench, f"flood-{number}")
        if not stays_connected:
            bench.lose(f"flood-{number}")
    assert _num_records(bench) == len(bench.state.by_routing) == (50 if stays_connected else 0)
    assert bench.state.refused == ({"crowd": 450} if stays_connected else {})
    assert bench.state.ledger.take_watermarks() == [], "the driver never heard of them"
    _hello(bench, "good", origin="runner at 10.0.0.1")
    assert bench.sent("good", Welcome), "one address does not keep out another"


def test_who_has_worked_and_who_is_connected_stays(monkeypatch):
    monkeypatch.setattr(registration, "_MAX_NEWCOMERS", 20)
    bench = Bench()
    bench.ready_run(batch=4000)
    _hello(bench, "runner", uuid="uuid-runner", incarnation=1)
    bench.fragment(steps=4)
    _hello(bench, "idle")
    for number in range(200):
        _hello(bench, f"flood-{number}")
    assert {"uuid-runner", "uuid-idle-0"} <= set(bench.state.runners)
    bench.lose("runner")
    assert ("uuid-runner", 1) in bench.state.ledger.runners, "what it delivered is known while others come"
    _hello(bench, "runner", uuid="uuid-runner", incarnation=1, hello_id=2)
    assert bench.sent("runner", Welcome)


def test_runners_that_worked_and_left_are_remembered_up_to_a_number(monkeypatch):
    monkeypatch.setattr("rlzmq.protocol.broker.state._MAX_ABSENT", 10)
    bench = Bench()
    bench.ready_run(batch=40_000)
    for number in range(30):
        bench.now += 1.0
        bench.hello("driver", "driver", name="driver", uuid="uuid-driver")
        bench.runner(f"{number}", first_unacked=3)
        bench.lose(f"{number}")
        bench.now += 10.0
        bench.tick()
    bench.now += 10.0
    bench.tick()
    assert len(bench.state.ledger.runners) == 10
    assert ("uuid-29", 1) in bench.state.ledger.runners


def _lines_per_event(kind: str, num_runners: int) -> dict[str, float]:
    """Lines of Python that the core runs per fragment and per heartbeat, once every runner has delivered."""
    world = World(kind, num_runners)
    world.run(2 * num_runners)
    step, num_lines = world.step, dict.fromkeys(("Fragment", "RunnerState"), 0)
    num_events = dict(num_lines)

    def counted(event: Any, key: str) -> None:
        def count(frame: FrameType, what: str, arg: Any) -> Any:
            num_lines[key] += what == "line"
            return count

        if key not in num_lines:
            return step(event, key)
        num_events[key] += 1
        answers: list[Any] = []
        answer, world.answer = world.answer, answers.append
        sys.settrace(count)
        try:
            step(event, key)
        finally:
            sys.settrace(None)
            world.answer = answer
        for item in answers:
            answer(item)
        return None

    world.step = counted  # type: ignore[method-assign]
    world.run(200)
    return {key: num_lines[key] / max(1, num_events[key]) for key in num_lines}


@pytest.mark.parametrize("kind", TERMS)
def test_an_event_costs_as_much_with_many_runners_as_with_few(kind: str) -> None:
    few, many = _lines_per_event(kind, 20), _lines_per_event(kind, 200)
    for key in few:
        assert many[key] < 1.5 * few[key], key
