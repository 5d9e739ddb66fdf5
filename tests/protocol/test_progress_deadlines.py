"""Slow, late and hung, told apart by the worker's own pace."""

from __future__ import annotations

from rlzmq.protocol.progress_deadlines import ProgressWatch, SilenceWatch, SlowRankDetector
from rlzmq.protocol.supervision import Patience


def _paced(interval: float, num: int = 50) -> ProgressWatch:
    watch = ProgressWatch(min_hung_s=30.0)
    for count in range(num + 1):
        assert watch.stamp(count, count * interval)
    return watch


def test_unknown_workers_are_well():
    assert ProgressWatch().health(1e9) == "ok"


def test_limits_follow_the_workers_own_pace():
    watch = _paced(1.0)
    assert [watch.health(50.0 + silent) for silent in (1, 4, 6, 29, 31)] == [
        "ok",
        "ok",
        "slow",
        "slow",
        "hung",
    ]
    slow = _paced(10.0)
    assert slow.hung_after_s() == 200.0
    assert slow.health(500.0 + 40) == "ok"


def test_a_given_timeout_is_taken_as_it_is():
    watch = ProgressWatch(timeout_s=2.0)
    watch.stamp(1, 0.0)
    assert watch.health(1.9) == "ok"
    assert watch.health(2.0) == "hung"


def test_only_a_change_is_progress_and_idleness_is_no_silence():
    watch = ProgressWatch(timeout_s=2.0)
    watch.stamp(1, 0.0)
    assert not watch.stamp(1, 1.9)
    assert watch.health(2.0) == "hung"
    watch.idle(5.0)
    assert watch.health(6.0) == "ok"


def test_a_peer_is_late_by_its_own_measure():
    watch = SilenceWatch(beat_s=0.5, min_s=2.0)
    assert not watch.is_late(100.0), "it never said anything"
    for count in range(10):
        watch.heard(count * 0.5)
    assert not watch.is_late(4.5 + 1.9)
    assert watch.is_late(4.5 + 2.0)
    watch.heard(6.0)  # it held the interpreter's lock for a second, and came back
    assert watch.limit_s() == 0.5 + 5 * 1.0
    assert not watch.is_late(6.0 + 5.4)
    for count in range(64):
        watch.heard(6.5 + count * 0.5)
    assert watch.limit_s() == 2.0, "long ago"


class Ranks:
    """Two ranks that report as told."""

    def __init__(self) -> None:
        self.watch = SlowRankDetector(min_s=2.0, first_s=60.0)
        self.watch.begin()
        self.reports(0.0, 0, 0, 0, is_training=False)

    def reports(self, now: float, a: int, b: int, update: int, *, is_training: bool = True) -> None:
        self.watch.heard("a", a, update, now, is_training=is_training)
        self.watch.heard("b", b, update, now, is_training=is_training)


def test_the_rank_that_the_others_wait_for_hangs():
    ranks = Ranks()
    ranks.reports(1.0, 10, 10, 1)
    ranks.reports(2.0, 21, 20, 1)
    ranks.reports(3.0, 21, 20, 1)
    assert ranks.watch.hung(3.9) == []
    assert ranks.watch.hung(4.0) == ["b"]
    assert ranks.watch.hung(4.1) == [], "told once"


def test_before_the_first_update_ranks_have_more_time():
    ranks = Ranks()
    ranks.reports(1.0, 2, 1, 0)
    assert ranks.watch.hung(60.9) == []
    assert ranks.watch.hung(61.0) == ["b"]


def test_uneven_ranks_are_learnt_and_idle_ones_never_hang():
    ranks = Ranks()
    ranks.reports(1.0, 10, 9, 1)
    ranks.reports(2.9, 10, 10, 1)  # b was 1.9 s behind
    assert ranks.watch.limit_s() == 19.0
    ranks.reports(3.0, 12, 11, 1, is_training=False)
    assert ranks.watch.hung(1e3) == [], "one whose TRAIN was lost does not hang"


def test_an_accused_group_gets_more_time_until_it_has_worked():
    ranks = Ranks()
    for update, limit_s in ((1, 2.0), (2, 4.0), (3, 8.0)):
        ranks.watch.begin()
        now = 100.0 * update
        ranks.reports(now, 10, 9, update)
        assert ranks.watch.hung(now + limit_s - 0.1) == []
        assert ranks.watch.hung(now + limit_s) == ["b"]
    ranks.reports(500.0, 50, 50, 53)
    assert ranks.watch.limit_s() == 2.0


def test_patience_doubles_with_each_kill_and_comes_back_with_work():
    patience = Patience(1.0, max_s=4.0, restored_after=3)
    for expected in (2.0, 4.0, 4.0):
        patience.killed()
        assert patience.seconds == expected
    for _ in range(2):
        patience.worked()
    assert patience.seconds == 4.0
    patience.worked()
    assert patience.seconds == 1.0
