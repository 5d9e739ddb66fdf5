"""The broker's clock: heartbeats, patience, and what happens where the broker itself was stopped."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.protocol.events import Tick
from rlzmq.wire.messages import BrokerBeat, Goodbye, Progress, Refused


def _ticks(bench: Bench, until: float, every: float = 0.5) -> None:
    """Ticks until then."""
    while bench.now < until:
        bench.now += every
        bench.event(Tick())


def test_everybody_hears_the_broker_at_its_pace_and_no_more_often():
    bench = Bench(heartbeat_s=0.5)
    bench.driver()
    bench.runner()
    heard: dict[str, list[float]] = {"driver": [], "runner": []}
    for eighths in range(13):
        bench.now = eighths / 8
        bench.event(Tick())
        for peer, times in heard.items():
            times += [bench.now for beat in bench.sent(peer, BrokerBeat) if beat == BrokerBeat(5)]
        assert len(bench.sent("driver", Progress)) == len(bench.sent("driver", BrokerBeat))
        assert bench.sent("runner", Progress) == []
    assert heard == {"driver": [0.0, 0.5, 1.0, 1.5], "runner": [0.0, 0.5, 1.0, 1.5]}


def test_a_peer_is_lost_once_it_was_silent_for_its_time():
    bench = Bench(peer_timeout_s=2.0)
    bench.runner()
    for now in (0.0, 0.75, 1.5, 1.9375):
        bench.now = now
        bench.event(Tick())
    assert bench.state.runners
    bench.now = 2.0
    bench.event(Tick())
    assert not bench.state.runners


def test_the_first_look_at_the_clock_is_no_absence():
    bench = Bench(peer_timeout_s=1.0)
    bench.runner()
    bench.now = 1.5
    bench.event(Tick())
    assert not bench.state.runners


@pytest.mark.parametrize(("away_s", "is_there"), [(2.0, True), (1.9375, False)])
def test_half_of_its_patience_without_a_tick_is_an_absence(away_s, is_there):
    bench = Bench(peer_timeout_s=4.0)
    bench.runner()
    _ticks(bench, 2.0)
    bench.now += away_s
    bench.event(Tick())
    bench.now = 4.0
    bench.event(Tick())
    assert bool(bench.state.runners) is is_there, "as much longer as the broker was away"


def test_an_absence_of_the_broker_ends_no_lease_though_others_are_free():
    bench = Bench(peer_timeout_s=100.0)
    bench.ready_run(batch=20, lease_timeout_s=10.0)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.runner("b")
    bench.event(Tick())
    bench.now = 60.0
    bench.event(Tick())
    assert list(bench.state.leases.leases) == [lease.lease_id]
    _ticks(bench, 69.5)
    assert list(bench.state.leases.leases) == [lease.lease_id]
    _ticks(bench, 70.0)
    assert lease.lease_id not in bench.state.leases.leases, "it has its whole time, no more"
    assert len(bench.leases("b")) == 1


def test_runners_that_are_away_are_looked_for_every_ten_seconds():
    bench = Bench(forget_after_s=1.0)
    bench.runner()
    bench.send("runner", Goodbye("done"))
    bench.event(Tick())
    _ticks(bench, 9.5)
    assert bench.state.ledger.runners
    _ticks(bench, 10.0)
    assert not bench.state.ledger.runners
    bench.runner()
    assert bench.sent("runner", Refused)[0].reason == "fenced"
