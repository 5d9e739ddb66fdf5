"""Peers from outside that say HELLO without end, or never read: few are remembered, others are not hurt."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.protocol.broker import state
from rlzmq.protocol.core import Overrun, PeerLost, Received, Tick
from rlzmq.wire.messages import Hello, Notice, Refused, Rejected, Welcome

ORIGIN = "runner at 10.0.0.9"


def _hello(bench: Bench, peer: str, number: int = 0, origin: str = ORIGIN, **fields) -> list:
    values = {"name": f"{peer}@host", "uuid": f"uuid-{peer}-{number}", "num_envs": 1, **fields}
    return bench.event(Received(peer.encode(), Hello("runner", **values), origin=origin))


def _num_records(bench: Bench) -> int:
    state = bench.state
    return max(len(state.names), len(state.hello_ids), len(state.ledger.runners), len(state.newcomers))


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
def test_ever_new_processes_are_remembered_up_to_a_number(monkeypatch, stays_connected):
    monkeypatch.setattr(state, "_MAX_PER_ORIGIN", 50)
    bench = Bench()
    for number in range(500):
        _hello(bench, f"flood-{number}")
        if not stays_connected:
            bench.event(PeerLost(f"flood-{number}".encode()))
    assert _num_records(bench) <= 51
    assert len(bench.state.by_routing) <= 50
    assert len(bench.state.receipts._forgettable) <= 50
    assert bench.state.refused["crowd"] == 450
    assert bench.state.ledger.take_watermarks() == [], "the driver never heard of them"


def test_who_has_worked_and_who_is_connected_stays(monkeypatch):
    monkeypatch.setattr(state, "_MAX_PER_ORIGIN", 20)
    bench = Bench()
    bench.ready_run(batch=4000)
    _hello(bench, "runner", uuid="uuid-runner", incarnation=1)
    bench.fragment(steps=4)
    _hello(bench, "idle")
    for number in range(200):
        _hello(bench, f"flood-{number}")
        bench.event(PeerLost(f"flood-{number}".encode()))
    assert {"uuid-runner", "uuid-idle-0"} <= set(bench.state.runners)
    bench.event(PeerLost(b"runner"))
    told = []
    for number in range(200, 250):
        _hello(bench, f"flood-{number}")
        told += [refused.reason for refused in bench.sent("idle", Refused)]
    assert told == ["crowd"]
    assert ("uuid-runner", 1) in bench.state.ledger.runners, "what it delivered is known while others come"
    assert "uuid-idle-0" not in bench.state.runners, "of a crowd that is all connected the first one leaves"


def test_one_address_does_not_push_out_another(monkeypatch):
    monkeypatch.setattr(state, "_MAX_PER_ORIGIN", 1000)
    monkeypatch.setattr(state, "_MAX_IN_ALL", 40)
    bench = Bench()
    for number in range(10):
        _hello(bench, f"good-{number}", origin="runner at 10.0.0.1")
        bench.event(PeerLost(f"good-{number}".encode()))
    for number in range(200):
        _hello(bench, f"flood-{number}")
    assert len(bench.state.newcomers) == 40
    assert all(f"uuid-good-{number}-0" in bench.state.hello_ids for number in range(10))


def test_local_peers_are_not_counted(monkeypatch):
    monkeypatch.setattr(state, "_MAX_PER_ORIGIN", 2)
    bench = Bench()
    for number in range(20):
        bench.runner(f"{number}")
    assert len(bench.state.runners) == 20
    assert len(bench.state.newcomers) == 0


def test_runners_that_worked_and_left_are_remembered_up_to_a_number(monkeypatch):
    monkeypatch.setattr("rlzmq.protocol.broker.state._MAX_ABSENT", 10)
    bench = Bench()
    bench.ready_run(batch=40_000)
    for number in range(30):
        bench.now += 1.0
        bench.hello("driver", "driver", name="driver", uuid="uuid-driver")
        bench.runner(f"{number}", first_unacked=3)
        bench.event(PeerLost(f"{number}".encode()))
        bench.now += 10.0
        bench.event(Tick())
    bench.now += 10.0
    bench.event(Tick())
    assert len(bench.state.ledger.runners) == 10
    assert ("uuid-29", 1) in bench.state.ledger.runners


def test_who_never_reads_is_expelled():
    bench = Bench()
    bench.driver()
    _hello(bench, "a")
    bench.event(Overrun(b"a"))
    assert bench.sent("a", Refused)[0].reason == "expelled"
    assert [notice.event for notice in bench.sent("driver", Notice)] == ["expelled"]
    bench.event(Overrun(b"a"))
    bench.event(Overrun(b"asked-for-the-config"))
    assert bench.out == []
    assert bench.state.refused == {"overrun": 3}
    assert not bench.state.runners
