"""What one peer, or time, may do to a broker: bounded memory, no foreign names, no impossible numbers."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.protocol.core import Tick
from rlzmq.protocol.driver_core import parse_report
from rlzmq.wire.messages import (
    Accepted,
    DriverState,
    Goodbye,
    Notice,
    Refused,
    Rejected,
    RunnerState,
    Train,
    UpdateReport,
)


def _running(**options) -> Bench:
    bench = Bench(**options)
    bench.ready_run(batch=20)
    bench.runner()
    return bench


def _train(bench: Bench, update_id: int) -> UpdateReport:
    """One update from its fragment to its report."""
    if update_id:
        bench.open(update_id, batch=20)
    (lease,) = bench.leases()
    bench.fragment(lease.lease_id, version=update_id)
    plan = bench.make_ready()
    assert bench.sent("learner-0", Train)
    out = bench.done(plan)
    (report,) = [item for item in out if isinstance(getattr(item, "message", None), UpdateReport)]
    bench.weights(update_id + 1)
    return parse_report(report.message, report.payload)


# ------------------------------------------------------------------ who it is


def test_a_connection_is_one_peer_at_a_time():
    bench = _running()
    assert bench.state.leases.leased_env_steps() == 20
    for index in range(50):
        bench.hello(
            "runner", "runner", num_envs=4, name=f"runner-{index}", uuid=f"another-{index}", hello_id=1
        )
    assert list(bench.state.runners) == ["another-49"]
    assert bench.state.leases.leased_env_steps() == 20, "what the others had is free again"


@pytest.mark.parametrize("fields", [{"uuid": "u" * 201}, {"name": "n" * 201}])
def test_an_impossible_hello_is_refused(fields):
    bench = Bench()
    bench.hello("runner", "runner", num_envs=4, **fields)
    assert bench.sent("runner", Refused)[0].reason == "identity"
    assert not bench.state.runners


def test_names_and_hellos_of_the_past_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("rlzmq.protocol.broker.state._MAX_KNOWN", 10)
    bench = Bench()
    for index in range(30):
        bench.hello(f"{index}", "runner", num_envs=1)
    assert len(bench.state.names) == len(bench.state.hello_ids) == 10
    bench.hello("20", "runner", num_envs=1)  # known for long, and heard of just now
    newest = [str(index) for index in [*range(21, 30), 20]]
    assert list(bench.state.names) == [("runner", name) for name in newest]
    assert list(bench.state.hello_ids) == [f"uuid-{name}" for name in newest]


def test_of_processes_that_are_not_let_in_again_the_oldest_are_let_go(monkeypatch):
    monkeypatch.setattr("rlzmq.protocol.broker.state._MAX_FENCED", 3)
    bench = Bench()
    for index in range(5):  # each takes the name from its predecessor
        bench.hello(f"{index}", "runner", num_envs=1, name="runner")
    assert list(bench.state.fenced) == ["uuid-1", "uuid-2", "uuid-3"]


# ------------------------------------------------------------------ what it says


def test_a_fragment_under_another_name_leaves_no_trace():
    bench = _running()
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
    bench = _running()
    bench.fragment(**fields)
    assert bench.sent("driver", Notice)[0].event == "protocol_error"
    (told, _offence) = bench.sent("runner", Rejected)
    assert (told.seq, told.reason, told.detail) == (fields.get("seq", 0), "rejected", "an impossible number")
    accounting = bench.state.ledger.accounting
    assert (accounting.sampled, sum(accounting.dropped.values())) == (0, 0)
    assert bench.state.ledger.runner("uuid-runner", 1).beyond == set()


def test_a_runner_cannot_be_done_with_what_it_never_sent():
    bench = _running()
    bench.send("runner", RunnerState(2**60, 2**60, (), (), False, 1, 0, -1, 0, 0))
    assert bench.sent("driver", Notice)[0].event == "protocol_error"
    assert bench.state.ledger.runner("uuid-runner", 1).watermark == 0


def test_fragments_of_a_fenced_process_are_counted_only_as_far_as_it_may_have_sent_them():
    bench = _running()
    bench.hello("again", "runner", num_envs=4, name="runner", uuid="newer", incarnation=2)
    for seq in (0, 2**62):
        bench.fragment(seq=seq)
        assert bench.sent("runner", Rejected)[0].reason == "fenced"
    assert bench.state.ledger.accounting.dropped == {"fenced": 20}


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


# ------------------------------------------------------------------ records


def test_a_runner_that_is_gone_for_long_is_forgotten_and_may_not_come_back():
    bench = _running(forget_after_s=100.0)
    _train(bench, 0)
    bench.send("driver", DriverState(-1, 1))
    assert bench.state.receipts._forgettable
    bench.now = 20.0
    bench.event(Tick())  # nobody was heard of since: all are lost
    assert not bench.state.runners
    bench.now = 125.0
    bench.event(Tick())
    assert not bench.state.ledger.runners
    assert not bench.state.receipts._forgettable
    bench.runner()
    assert bench.sent("runner", Refused)[0].reason == "fenced"
    bench.driver(next_update=1)
    bench.learner(generation=2, next_update=1)
    bench.weights(1, generation=2)
    bench.open(1, batch=20)
    bench.runner("another")
    bench.fragment(bench.leases("another")[0].lease_id, runner="another", version=1, generation=2)
    out = bench.done(bench.make_ready())
    (report,) = [item for item in out if isinstance(getattr(item, "message", None), UpdateReport)]
    opened = parse_report(report.message, report.payload)
    assert list(opened.forgotten) == [("uuid-runner", 1)]
    assert opened.watermarks == {("uuid-another", 1): 1}


def _kept(bench: Bench, until: float) -> list[str]:
    """Runners with a record, after ticks every ten seconds; those who are there are heard."""
    while bench.now < until:
        bench.now += 10.0
        for peer in list(bench.state.by_routing):
            if peer != b"driver":
                bench.send(peer.decode(), RunnerState(0, 0, (), (), False, 1, 0, -1, 0, 0))
        bench.event(Tick())
    return [uuid for uuid, _ in bench.state.ledger.runners]


def _with_runners(*names: str, **options) -> Bench:
    bench = Bench(peer_timeout_s=1e4, **options)
    for name in names:
        bench.runner(name)
    bench.event(Tick())
    return bench


def test_a_runner_is_forgotten_the_whole_time_after_it_was_last_here():
    bench = _with_runners("there", "holds", "comes back", forget_after_s=50.0)
    bench.fragment(steps=9, runner="holds")
    for name in ("holds", "comes back"):
        bench.send(name, Goodbye("bye"))
    assert _kept(bench, 40.0) == ["uuid-there", "uuid-holds", "uuid-comes back"]
    bench.runner("comes back")
    _kept(bench, 50.0)
    bench.send("comes back", Goodbye("bye"))
    assert _kept(bench, 100.0) == ["uuid-there", "uuid-holds", "uuid-comes back"]
    assert _kept(bench, 110.0) == ["uuid-there", "uuid-holds"], "what it holds is not trained yet"
