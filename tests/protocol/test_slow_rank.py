"""Limits of those who watch, to the second: ranks, silent peers, whoever should be registered, the run as a whole."""

from __future__ import annotations

import pytest

from rlzmq.protocol.progress_deadlines import (
    ExpectedPeers,
    ProgressWatch,
    SilenceWatch,
    SlowRankDetector,
    StandstillWatch,
)
from rlzmq.protocol.supervision import Patience, RestartPolicy, Supervision

# ------------------------------------------------------------------ ranks


def _ranks(min_s: float = 2.0, first_s: float = 60.0, update: int = 1) -> SlowRankDetector:
    """Two ranks that have trained an update, then begun the next: a is at collective 10, b at 9, since 0 s."""
    watch = SlowRankDetector(min_s=min_s, first_s=first_s)
    for uuid in "ab":
        watch.heard(uuid, 0, 0, 0.0, is_training=False)
    for uuid, count in (("a", 10), ("b", 9)):
        watch.heard(uuid, count, update, 0.0, is_training=True)
    return watch


def test_the_limit_before_the_first_update_holds_until_every_rank_has_trained_one():
    watch = _ranks()
    assert watch.limit_s() == 2.0
    watch.heard("c", 9, 1, 0.0, is_training=True)
    assert watch.limit_s() == 60.0, "c is new"
    watch.heard("c", 9, 2, 0.0, is_training=True)
    assert watch.limit_s() == 2.0


def test_a_wait_is_learnt_when_the_rank_behind_has_caught_up():
    watch = _ranks()
    watch.heard("b", 10, 1, 1.5, is_training=True)
    assert watch.limit_s() == 15.0
    watch.heard("b", 10, 1, 9.0, is_training=True)
    assert watch.limit_s() == 15.0, "it was there already"
    watch.heard("b", 12, 1, 9.5, is_training=True)
    watch.heard("a", 12, 1, 9.75, is_training=True)
    assert watch.limit_s() == 15.0, "the longest of late counts"
    assert watch.hung(100.0) == []


def test_one_that_has_not_caught_up_yet_is_still_waited_for():
    watch = _ranks()
    watch.heard("a", 20, 1, 1.0, is_training=True)
    watch.heard("b", 15, 1, 2.5, is_training=True)
    assert watch.limit_s() == 2.0
    assert watch.hung(2.9) == []
    assert watch.hung(3.0) == ["b"]


def test_only_ranks_at_work_hang():
    watch = _ranks()
    watch.heard("b", 9, 1, 1.0, is_training=False)
    assert watch.hung(100.0) == []
    watch.heard("b", 9, 1, 100.0, is_training=True)
    assert watch.hung(100.0) == ["b"]


def test_the_doubled_limit_has_a_bound_and_ends_with_fifty_updates():
    watch = _ranks(min_s=20.0)
    now = 0.0
    for limit_s in (20.0, 40.0, 60.0, 60.0):
        assert watch.limit_s() == limit_s
        now += limit_s
        assert watch.hung(now - 0.5) == []
        assert watch.hung(now) == ["b"]
    watch.heard("a", 10, 50, now, is_training=True)
    assert watch.limit_s() == 60.0
    watch.heard("a", 10, 51, now, is_training=True)
    assert watch.limit_s() == 20.0


def test_the_fifty_updates_count_from_the_foremost_rank():
    watch = _ranks(min_s=20.0)
    watch.heard("a", 10, 5, 0.0, is_training=True)
    assert watch.hung(20.0) == ["b"]
    watch.heard("b", 9, 54, 20.0, is_training=True)
    assert watch.limit_s() == 40.0
    watch.heard("b", 9, 55, 20.0, is_training=True)
    assert watch.limit_s() == 20.0


def test_a_new_generation_counts_from_the_beginning():
    watch = _ranks()
    watch.begin()
    assert watch.hung(100.0) == []
    for uuid, count in (("a", 2), ("b", 1)):
        watch.heard(uuid, count, 1, 100.0, is_training=True)
    assert watch.hung(101.9) == []
    assert watch.hung(102.0) == ["b"]


def test_who_is_not_in_the_new_generation_holds_back_nobody():
    watch = _ranks()
    watch.heard("c", 9, 1, 0.0, is_training=True)
    assert watch.limit_s() == 60.0, "c is new"
    watch.begin()
    for uuid in "ab":
        watch.heard(uuid, 0, 1, 100.0, is_training=False)
    assert watch.limit_s() == 2.0


def test_ranks_get_back_the_time_that_the_watcher_was_away():
    watch = _ranks()
    watch.forgive(50.0, 51.0)
    assert watch.hung(51.9) == []
    assert watch.hung(52.0) == ["b"]
    watch.forgive(50.0, 60.0)
    assert watch.hung(63.9) == [], "never more than all of it"
    assert watch.hung(64.0) == ["b"]


# ------------------------------------------------------------------ progress and silence


def test_slow_is_five_times_the_median_and_hung_twenty_times_the_longest_of_99_in_100():
    watch = ProgressWatch(min_hung_s=1.0)
    now = 0.0
    watch.stamp(0, now)
    for count in range(1, 101):
        now += 50.0 if count == 50 else 2.0 if count > 60 else 1.0
        watch.stamp(count, now)
    assert watch.usual_s() == 50.0
    for count in range(101, 201):
        now += 1.0
        watch.stamp(count, now)
    assert watch.usual_s() == 2.0, "one in two hundred is the exception"
    assert watch.hung_after_s() == 40.0
    assert [watch.health(now + silent) for silent in (5.0, 5.1, 39.9, 40.0)] == ["ok", "slow", "slow", "hung"]


def test_the_median_is_the_middle_one():
    watch = ProgressWatch()
    for count, now in enumerate((0.0, 1.0, 2.0, 3.0, 6.0, 9.0, 12.0)):
        watch.stamp(count, now)
    assert [watch.health(12.0 + silent) for silent in (15.0, 15.1)] == ["ok", "slow"]


def test_before_any_interval_is_known_the_least_limit_counts():
    watch = ProgressWatch(min_hung_s=30.0, first_timeout_s=100.0)
    assert watch.usual_s() == 0.0
    watch.stamp(0, 0.0)
    assert (watch.hung_after_s(), watch.health(99.0), watch.health(100.0)) == (100.0, "ok", "hung")
    watch.stamp(1, 100.0)
    assert watch.hung_after_s() == 2000.0, "that was its first interval"
    fresh = ProgressWatch(min_hung_s=30.0, first_timeout_s=100.0)
    fresh.stamp(5, 0.0)
    assert fresh.hung_after_s() == 30.0, "it had begun already"


def test_workers_get_back_the_time_that_the_watcher_was_away():
    watch = ProgressWatch(timeout_s=10.0)
    watch.stamp(1, 0.0)
    watch.forgive(50.0, 55.0)
    assert (watch.health(59.9), watch.health(60.0)) == ("ok", "hung")
    watch.forgive(50.0, 60.0)
    assert (watch.health(69.9), watch.health(70.0)) == ("ok", "hung")


def test_peers_get_back_the_time_that_the_watcher_was_away():
    watch = SilenceWatch(0.5, 2.0)
    watch.forgive(50.0, 55.0)
    assert not watch.is_late(1e9), "it never said anything"
    watch.heard(0.0)
    watch.forgive(50.0, 51.0)
    assert (watch.is_late(51.9), watch.is_late(52.0)) == (False, True)
    watch.forgive(50.0, 60.0)
    assert (watch.is_late(61.9), watch.is_late(62.0)) == (False, True)
    watch.heard(62.75)
    assert watch.limit_s() == 0.5 + 5 * 2.25


# ------------------------------------------------------------------ who should be registered


def test_whoever_is_absent_is_told_at_intervals_and_hangs_after_ten_times():
    roll_call = ExpectedPeers(after_s=3.0)
    told = []
    for half_seconds in range(80):
        now = half_seconds / 2
        roll_call.look([("runner", "b"), ("runner", "a")], [("runner", "a")], now)
        told += [(now, name, absence.event, absence.since) for _, name, absence in roll_call.overdue(now)]
    expected = [(3.0 * n, "b", "silent" if n <= 10 else "hung", 0.0) for n in range(1, 14)]
    assert told == expected


def test_who_was_there_in_between_is_absent_from_then():
    roll_call = ExpectedPeers(after_s=3.0)
    roll_call.look([("runner", "a")], [], 0.0)
    roll_call.look([("runner", "a")], [("runner", "a")], 2.0)
    roll_call.look([("runner", "a")], [], 2.5)
    assert roll_call.overdue(5.0) == []
    ((role, name, absence),) = roll_call.overdue(5.5)
    assert (role, name, absence.since, absence.num_reports) == ("runner", "a", 2.5, 1)


def test_the_absent_get_back_the_time_that_the_watcher_was_away():
    roll_call = ExpectedPeers(after_s=3.0)
    roll_call.look([("runner", "a")], [], 0.0)
    roll_call.forgive(50.0, 51.0)
    assert roll_call.overdue(52.5) == []
    ((_, _, absence),) = roll_call.overdue(53.0)
    assert absence.since == 50.0
    roll_call.forgive(50.0, 60.0)
    assert (absence.since, absence.reported_at) == (60.0, 60.0)


# ------------------------------------------------------------------ the run as a whole


def _still(watch: StandstillWatch, seconds: int, patience_s: float = 0.0) -> list[int]:
    """When it is told, looked at every second without a move."""
    watch.begin(0.0)
    watch.look(0, 0.0)
    told = []
    for second in range(1, seconds):
        watch.look(0, float(second))
        told += [second] if watch.is_still(patience_s, float(second)) else []
    return told


def test_a_standstill_is_told_at_its_limit_and_after_as_long_again():
    assert _still(StandstillWatch(min_s=10.0), 35) == [10, 20, 30]
    assert _still(StandstillWatch(min_s=10.0), 35, patience_s=6.0) == [12, 24]
    assert StandstillWatch(min_s=1.0).limit_s(0.0) == 1.0, "without any pace"
    watch = StandstillWatch(min_s=10.0, num_paces=4.0)
    for begin in (0.0, 100.0, 200.0):
        watch.begin(begin)
        watch.end(begin + (4.0 if begin else 50.0))
    watch.end(999.0)  # none was under way
    assert watch.limit_s(0.0) == 16.0
    assert watch.still_s(1000.0) == 0.0


def test_while_nobody_looked_nothing_stood_still():
    watch = StandstillWatch(min_s=10.0, max_gap_s=5.0)
    watch.begin(0.0)
    watch.look(0, 1.0)
    watch.look(0, 6.0)
    assert watch.still_s(6.0) == 5.0, "five seconds are no absence"
    watch.look(0, 12.0)
    assert watch.still_s(12.0) == 5.0
    watch.look(0, 13.0)
    assert watch.still_s(13.0) == 6.0


# ------------------------------------------------------------------ restarts


def test_a_budget_is_of_deaths_within_its_window_both_ends_included():
    for second, gives_up in ((60.0, True), (60.5, False)):
        machine = Supervision(RestartPolicy(max_restarts=1, window_s=60.0))
        machine.failed(0.0)
        assert machine.failed(second) == (None if gives_up else 0.2)
        assert (machine.num_failures, machine.incarnation) == ((2, 1) if gives_up else (1, 2))


@pytest.mark.parametrize(("lived_s", "delay_s"), [(59.5, 0.4), (60.0, 0.1)])
def test_only_a_run_of_a_whole_window_starts_the_delays_over(lived_s, delay_s):
    machine = Supervision(RestartPolicy(max_restarts=9))
    machine.failed(0.0)
    machine.failed(1.0)
    machine.started(2.0)
    assert (machine.failed(2.0 + lived_s), machine.incarnation) == (delay_s, 3)
    assert (machine.failed(2.0 + lived_s), machine.incarnation) == (2 * delay_s, 4), "it did not even start"


def test_useful_work_clears_the_account():
    machine = Supervision(RestartPolicy(max_restarts=2))
    machine.failed(0.0)
    machine.failed(0.0)
    machine.worked()
    assert [machine.failed(0.0), machine.failed(0.0)] == [0.1, 0.2]
    assert (machine.failed(0.0), machine.num_failures, machine.incarnation) == (None, 3, 4)


def test_a_long_life_of_deaths_does_not_overflow_its_delay():
    policy = RestartPolicy(max_restarts=10**6, window_s=1e9, max_delay_s=1e30)
    machine = Supervision(policy)
    delays = [machine.failed(float(number)) for number in range(2000)]
    assert delays[64] == delays[-1] == 0.1 * 2.0**64


@pytest.mark.parametrize("field", ["window_s", "first_delay_s", "max_delay_s"])
def test_durations_are_above_zero_and_no_restart_is_a_policy(field):
    with pytest.raises(ValueError, match=f"{field} must be above 0, not 0"):
        RestartPolicy(**{field: 0})
    assert RestartPolicy(max_restarts=0, **{field: 0.5})


def test_patience_is_restored_by_exactly_as_much_work():
    patience = Patience(1.0, max_s=30.0, restored_after=2)
    patience.worked()
    assert patience.seconds == 1.0
    patience.killed()
    patience.worked()
    patience.killed()
    assert patience.seconds == 4.0
    patience.worked()
    assert patience.seconds == 4.0, "counted from the last kill"
    patience.worked()
    assert patience.seconds == 1.0
