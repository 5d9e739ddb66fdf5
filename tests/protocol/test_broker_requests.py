"""What the driver asks of a broker and hears from it: lineages, updates, reports."""

from __future__ import annotations

from core_fakes import Bench

from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges
from rlzmq.wire.messages import (
    Rejected,
    TraceClock,
    TraceEvents,
)


def _range(seq: int, num_steps: int = 20) -> FragmentRange:
    return FragmentRange(FragmentId("uuid-runner", 1, seq), 0, num_steps)


# ------------------------------------------------------------------ a driver comes


def test_what_an_earlier_driver_left_open_below_is_void():
    bench = Bench()
    bench.driver()
    for update_id in range(4):
        bench.open(update_id)
    bench.driver(uuid="another", incarnation=9, next_update=2)
    assert bench.core.status()["open_updates"] == [2, 3]
    assert bench.core.status()["next_commit"] == 2
    bench.driver(uuid="third", incarnation=10, next_update=1)
    assert bench.core.status()["next_commit"] == 2


def test_updates_in_training_that_the_driver_has_reports_of_are_done():
    bench = Bench()
    bench.runner()
    bench.fragment(steps=20, seq=0)
    payload = (*pack_ranges([]), *pack_ranges([_range(0)]), *pack_ranges([_range(1)]))
    place = {"rank": 0, "num_ranks": 1, "training_updates": (0, 1), "training_attempts": (7, 8)}
    bench.hello("learner-0", "learner", payload, generation=1, **place)
    bench.driver(next_update=1, trained=20)
    assert bench.core.status()["updates_in_flight"] == [1]
    assert bench.state.ledger.accounting.counts() == {"sampled": 20, "trained": 20, "pending": 0}
    assert bench.state.ledger.is_committed(FragmentId("uuid-runner", 1, 0))


def test_what_was_sampled_before_the_drivers_lineage_is_dropped():
    bench = Bench()
    bench.runner()
    for generation in (1, 2, 3):
        bench.fragment(steps=10, generation=generation)
    bench.driver(next_update=4, generation=2)
    accounting = bench.state.ledger.accounting
    assert (accounting.dropped, accounting.pending) == ({"rolled_back": 10}, 20)
    bench.fragment(steps=5, generation=1)
    assert accounting.dropped == {"rolled_back": 15}


# ------------------------------------------------------------------ the trace


def test_stages_of_other_hosts_go_to_the_driver_one_message_at_a_time_and_its_clock_to_their_sender():
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.runner("other")

    def forwarded(peer, sent_s, payload=b"stages"):
        bench.send(peer, TraceEvents(sent_s, "forged"), (payload,))
        return [(message.source, message.sent_s) for message in bench.sent("driver", TraceEvents)]

    assert forwarded("runner", 1.0) == [("uuid-runner", 1.0)]
    assert forwarded("runner", 2.0) == [], "the first one is not answered"
    assert forwarded("other", 3.0) == [("uuid-other", 3.0)]
    bench.send("driver", TraceClock("uuid-runner", 1.0, 9.0))
    assert bench.sent("runner", TraceClock) == [TraceClock("uuid-runner", 1.0, 9.0)]
    assert bench.sent("other", TraceClock) == []
    assert forwarded("runner", 4.0) == [("uuid-runner", 4.0)]
    bench.now += 1.0
    assert forwarded("runner", 5.0) == [("uuid-runner", 5.0)], "the answer was lost"
    bench.now += 1.0
    assert forwarded("runner", 6.0, bytes(2 << 20)) == []
    assert bench.sent("runner", Rejected)[-1].reason == "bound"
