"""The broker's clock: heartbeats, patience, and what happens where the broker itself was stopped."""

from __future__ import annotations

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
