"""What the broker sends to learner ranks again, by what they say that they hold."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.wire.messages import LearnerState, Shard, ShardPlan, ShardReady, Train, UpdateReport

RECEIVING, READY, TRAINING = 0, 1, 2


def _holds(bench: Bench, *held: tuple[int, int, int, int], next_update: int = 0, generation: int = 1) -> None:
    """A heartbeat of rank 0; `held`: update, attempt, fragments, phase of each update at hand."""
    columns = [tuple(column) for column in zip(*held, strict=True)] or [()] * 4
    bench.send("learner-0", LearnerState(generation, next_update, *columns, 0))


def _planned(at: float = 10.0, **terms) -> tuple[Bench, ShardPlan]:
    """An update of one fragment was planned for the only rank."""
    bench = Bench(resend_s=2.0, peer_timeout_s=1e9)
    bench.now = at
    bench.ready_run(batch=20, **terms)
    bench.runner()
    bench.fragment(steps=20)
    (plan,) = bench.sent("learner-0", ShardPlan)
    return bench, plan


def _train(bench: Bench, plan: ShardPlan) -> list[Train]:
    bench.send("learner-0", ShardReady(plan.update_id, plan.attempt, plan.generation, 0))
    return bench.sent("learner-0", Train)


def test_a_shard_is_sent_again_when_it_is_due_and_not_before():
    bench, _ = _planned()
    sent = []
    for tenths in range(0, 50, 5):
        bench.now = 10.0 + tenths / 10
        _holds(bench)
        sent += [bench.now for _ in bench.sent("learner-0", ShardPlan)]
    assert sent == [12.0, 14.0]


@pytest.mark.parametrize("held", [(0, 1, 1, READY), (0, 2, 0, RECEIVING)])
def test_what_is_held_of_another_attempt_or_in_part_is_sent_again(held):
    bench, plan = _planned()
    bench.now += 2.0
    attempt = plan.attempt - 1 if held[1] == 1 else plan.attempt
    _holds(bench, (held[0], attempt, *held[2:]))
    assert bench.sent("learner-0", ShardPlan) == [plan]


def test_a_ready_that_was_lost_is_asked_for_with_the_shard():
    bench, plan = _planned()
    bench.now += 2.0
    _holds(bench, (0, plan.attempt, 1, READY))
    assert bench.sent("learner-0", ShardPlan) == [plan]


@pytest.mark.parametrize("is_other_attempt", [False, True])
def test_train_is_sent_again_until_the_rank_trains_that_attempt(is_other_attempt):
    bench, plan = _planned()
    bench.now = 15.0
    (train,) = _train(bench, plan)
    attempt = plan.attempt - is_other_attempt
    phase = TRAINING if is_other_attempt else READY
    sent = []
    for tenths in range(0, 50, 5):
        bench.now = 15.0 + tenths / 10
        _holds(bench, (0, attempt, 1, phase))
        sent += [bench.now for again in bench.sent("learner-0", Train) if again == train]
    assert sent == [17.0, 19.0]
    bench.now = 30.0
    _holds(bench, (0, plan.attempt, 1, TRAINING))
    assert bench.out == []


def test_what_a_rank_says_of_another_generation_is_ignored():
    bench, _ = _planned()
    bench.now += 5.0
    _holds(bench, generation=0, next_update=1)
    assert bench.out == []
    assert [learner["next_update"] for learner in bench.core.status()["learners"]] == [0]


def test_a_heartbeat_that_comes_late_does_not_take_back_what_a_rank_has_trained():
    bench, plan = _planned()
    _train(bench, plan)
    for next_update in (1, 0):
        _holds(bench, next_update=next_update)
        assert [learner["next_update"] for learner in bench.core.status()["learners"]] == [1]


def test_an_update_that_all_ranks_have_left_behind_is_committed_though_no_result_came():
    bench, plan = _planned()
    _train(bench, plan)
    _holds(bench, next_update=1)
    assert [report.update_id for report in bench.sent("driver", UpdateReport)] == [0]


def test_a_heartbeat_whose_columns_differ_in_length_is_read_as_far_as_it_goes():
    bench, plan = _planned()
    bench.now += 2.0
    bench.send("learner-0", LearnerState(1, 0, (0,), (plan.attempt,), (), (), 0))
    assert bench.sent("learner-0", ShardPlan) == [plan]


def _two_in_flight() -> tuple[Bench, ShardPlan, ShardPlan]:
    """Update 0 was planned at 10 s, update 1 at 11 s."""
    bench, first = _planned(staleness=1, max_policy_lag=1)
    bench.now = 11.0
    bench.open(1, batch=20, staleness=1, max_policy_lag=1)
    bench.fragment(steps=20)
    (second,) = bench.sent("learner-0", ShardPlan)
    return bench, first, second


def test_an_update_that_was_just_sent_does_not_hide_the_next():
    bench, first, second = _two_in_flight()
    bench.now = 12.5
    assert _train(bench, first)
    bench.now = 13.0
    _holds(bench, (0, first.attempt, 1, READY))
    assert bench.sent("learner-0", Train) == [], "just sent"
    assert bench.sent("learner-0", ShardPlan) == [second]


def test_a_rank_that_is_ahead_of_the_others_gets_the_next_and_nothing_of_what_it_trained():
    bench = Bench(resend_s=2.0, peer_timeout_s=1e9)
    bench.ready_run(num_ranks=2, batch=20, staleness=1, max_policy_lag=1)
    bench.open(1, batch=20, num_ranks=2, staleness=1, max_policy_lag=1)
    bench.runner()
    bench.fragment(steps=20)
    plans = bench.sent("learner-0", ShardPlan)
    bench.fragment(steps=20)
    plans += bench.sent("learner-0", ShardPlan)
    for rank in (0, 1):
        bench.send(f"learner-{rank}", ShardReady(0, plans[0].attempt, 1, rank))
    bench.now = 5.0
    _holds(bench, next_update=1)  # rank 1 still trains update 0
    assert bench.sent("learner-0", Train) == []
    assert [plan.update_id for plan in bench.sent("learner-0", ShardPlan)] == [1]
    assert [shard.update_id for shard in bench.sent("learner-0", Shard)] == [1]


def test_a_rank_that_is_ready_gets_nothing_while_another_is_waited_for():
    bench = Bench(resend_s=2.0, peer_timeout_s=1e9)
    bench.ready_run(num_ranks=2, batch=20)
    bench.runner()
    bench.fragment(steps=20)
    (plan,) = bench.sent("learner-0", ShardPlan)
    assert _train(bench, plan) == []
    bench.now = 5.0
    _holds(bench, (0, plan.attempt, 1, READY))
    assert bench.out == []
