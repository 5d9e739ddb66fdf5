"""What runners say in heartbeats that they do not hold any more, and what the broker makes of it."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.wire.fragment_message import FragmentRange, unpack_ranges
from rlzmq.wire.messages import Accepted, Committed, DriverState, Rejected, RunnerState, UpdateCommitted
from rlzmq.wire.schema import FragmentId


def _holds_from(bench: Bench, first_unacked: int) -> list:
    return bench.send("runner", RunnerState(first_unacked, 99, (), (), False, 1, 0, -1, 0, 0))


def _trained(bench: Bench) -> None:
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    bench.done(bench.make_ready())


def test_what_it_may_forget_is_told_again_until_it_has_forgotten_it():
    bench = Bench()
    _trained(bench)
    bench.send("driver", DriverState(-1, 1))
    assert bench.sent("runner", Committed) == [Committed(1, 1, ())]
    for first_unacked, told in ((0, [Committed(1, 1, ())]), (1, [])):
        _holds_from(bench, first_unacked)
        assert bench.sent("runner", Committed) == told


def test_what_it_does_not_hold_any_more_is_not_taken_again():
    bench = Bench()
    bench.driver()
    bench.runner()
    _holds_from(bench, 5)
    bench.fragment(seq=4)
    assert bench.state.ledger.accounting.counts() == {"sampled": 0, "trained": 0, "pending": 0}
    assert bench.sent("runner", Accepted) == [Accepted(1, ((4, 4),))]
    assert bench.sent("runner", Committed) == [Committed(1, 5, ())]
    bench.fragment(seq=5)
    assert bench.state.ledger.accounting.pending == 20


@pytest.mark.parametrize(("first_unacked", "is_possible"), [(0, True), (65_536, True), (65_537, False)])
def test_it_cannot_be_done_with_more_than_a_runner_can_have_sent(first_unacked, is_possible):
    bench = Bench()
    bench.runner()
    _holds_from(bench, first_unacked)
    assert bench.state.ledger.runner("uuid-runner", 1).watermark == first_unacked * is_possible
    assert bench.state.refused == ({} if is_possible else {"schema": 1})


def test_learners_are_told_the_most_that_it_said():
    bench = Bench()
    _trained(bench)
    for first_unacked in (3, 2):
        _holds_from(bench, first_unacked)
    bench.send("driver", DriverState(-1, 1))
    (payload,) = [item.payload for item in bench.out if isinstance(item.message, UpdateCommitted)]
    assert unpack_ranges(payload) == [FragmentRange(FragmentId("uuid-runner", 1, 3), 0, 0)]


@pytest.mark.parametrize(("seq", "is_possible"), [(65_536, True), (65_537, False)])
def test_a_fragment_is_not_further_ahead_than_a_runner_can_be(seq, is_possible):
    bench = Bench()
    bench.runner()
    bench.fragment(seq=seq)
    assert bench.state.ledger.accounting.pending == 20 * is_possible


def test_a_fragment_has_at_most_a_step_per_byte():
    measured = Bench()
    measured.runner()
    measured.fragment(steps=130)
    num_bytes = measured.state.ledger.num_bytes
    assert 128 <= num_bytes < 255, "packed in as many bytes as 130"
    bench = Bench()
    bench.runner()
    for steps, refused in ((0, {}), (num_bytes, {}), (num_bytes + 1, {"schema": 1})):
        bench.fragment(steps=steps)
        assert bench.state.refused == refused
    assert bench.state.ledger.accounting.sampled == num_bytes


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
