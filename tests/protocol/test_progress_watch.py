"""Slow and hung, told apart by the worker's own pace."""

from __future__ import annotations

from rlzmq.protocol.progress_watch import ProgressWatch


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
