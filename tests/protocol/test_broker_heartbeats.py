"""What runners say in heartbeats that they do not hold any more, and what the broker makes of it."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import FragmentRange, unpack_ranges
from rlzmq.wire.messages import DriverState, Rejected, RunnerState, UpdateCommitted


def _holds_from(bench: Bench, first_unacked: int) -> list:
    return bench.send("runner", RunnerState(first_unacked, 99, (), (), False, 1, 0, -1, 0, 0))


def _trained(bench: Bench) -> None:
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    bench.done(bench.make_ready())


def test_learners_are_told_the_most_that_it_said():
    bench = Bench()
    _trained(bench)
    for first_unacked in (3, 2):
        _holds_from(bench, first_unacked)
    bench.send("driver", DriverState(-1, 1))
    (payload,) = [item.payload for item in bench.out if isinstance(item.message, UpdateCommitted)]
    assert unpack_ranges(payload) == [FragmentRange(FragmentId("uuid-runner", 1, 3), 0, 0)]


def test_all_fragments_that_may_be_ahead_may_be_done_with(monkeypatch):
    monkeypatch.setattr("rlzmq.protocol.broker.intake._MAX_SEQ_AHEAD", 3)
    bench = bench_with_runner()
    for seq in (1, 2, 3):
        bench.fragment(seq=seq, version=9)  # of weights that nobody has made
    for seq in (1, 0):
        bench.fragment(seq=seq)
    assert bench.state.refused == {}
    assert bench.state.ledger.accounting.num_duplicates == 1


@pytest.mark.parametrize(
    ("version", "generation", "is_taken"), [(0, 0, True), (-1, 0, False), (0, -1, False)]
)
def test_a_fragment_names_the_weights_that_it_was_sampled_with(version, generation, is_taken):
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.fragment(version=version, generation=generation)
    assert bench.state.ledger.accounting.pending == 20 * is_taken
    details = [rejected.detail for rejected in bench.sent("runner", Rejected)]
    assert details == ([] if is_taken else ["uuid-runner/1/0: negative version or generation"])
