"""How long nothing may come: by the worker's own pace, in time that the machine gave."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.core.patience import FACTOR, CoreWait, FairClock, Patience, RestartPolicy, Supervision


def over_at(patience: Patience, since: float) -> float:
    """Return the seconds of silence after which it is over."""
    return next(tenths / 10 for tenths in range(10_000) if patience.is_over(since + tenths / 10))


def test_the_limit_follows_the_longest_recent_interval() -> None:
    patience = Patience(3.0)
    for now in (0.0, 0.5, 1.0):
        patience.moved(now)
    assert over_at(patience, 1.0) == 3.0
    patience.moved(5.0)
    assert over_at(patience, 5.0) == FACTOR * 4.0
    for number in range(300):
        patience.moved(5.0 + 0.1 * number)
    assert patience.limit_s == 3.0, "it was long ago"


def test_until_the_pace_is_known_there_is_more_time() -> None:
    patience = Patience(3.0, 30.0)
    patience.begin(10.0)
    assert over_at(patience, 10.0) == 30.0
    for number in range(1, 5):
        assert not patience.is_known
        patience.moved(10.0 + number)
    assert patience.is_known
    assert patience.limit_s == FACTOR


def test_time_in_which_nothing_is_expected_is_no_interval() -> None:
    patience = Patience(3.0)
    patience.moved(0.0)
    patience.begin(100.0)
    patience.moved(101.0)
    assert patience.limit_s == FACTOR


def test_who_was_killed_gets_twice_the_time_until_it_has_worked_for_a_while() -> None:
    patience = Patience(3.0)
    limits = []
    for _ in range(6):
        patience.killed()
        limits.append(patience.limit_s)
    assert limits == [6.0, 12.0, 24.0, 48.0, 48.0, 48.0]
    for number in range(49):
        patience.moved(0.01 * number)
    assert patience.limit_s == 48.0
    patience.moved(1.0)
    assert patience.limit_s == 3.0


def test_a_gap_between_two_readings_is_no_time() -> None:
    real = [10.0]
    clock = FairClock(0.5, lambda: real[0])
    start = clock.now()
    for real[0] in (10.4, 10.9, 70.0, 70.5):
        now = clock.now()
    assert round(now - start, 6) == 0.4 + 0.5 + 1.0 + 0.5


def test_who_shares_a_core_waits_for_it_and_who_sleeps_does_not() -> None:
    core = str(min(os.sched_getaffinity(0)))
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    sleep = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
    started = [
        subprocess.Popen(["taskset", "-c", core, *command], stdout=subprocess.PIPE)
        for command in (spin, spin, spin, sleep)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        waits = {process: CoreWait() for process in started}
        for process, wait in waits.items():
            wait.begin(process.pid)
        start = time.monotonic()
        time.sleep(1.0)
        waited = [wait.take_s() / (time.monotonic() - start) for wait in waits.values()]
        assert sum(waited[:3]) > 1.0, "of three, two wait at any time"
        assert waited[3] < 0.2
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_without_restarts_the_first_death_gives_up() -> None:
    assert Supervision(RestartPolicy(max_restarts=0)).failed(1.0) is None


def test_delays_double_up_to_the_maximum() -> None:
    machine = Supervision(RestartPolicy(max_restarts=12, window_s=1e6, max_delay_s=5.0))
    delays = [machine.failed(float(number)) for number in range(8)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_a_long_run_starts_the_delays_over() -> None:
    machine = Supervision(RestartPolicy(max_restarts=9))
    machine.failed(0.0)
    machine.failed(1.0)
    machine.started(2.0)
    assert (machine.failed(62.0), machine.incarnation) == (0.1, 3)


@settings(max_examples=50)
@given(
    gaps=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30),
    max_restarts=st.integers(0, 6),
    runs=st.booleans(),
)
def test_no_window_ever_holds_more_restarts_than_the_budget(
    gaps: list[float], max_restarts: int, runs: bool
) -> None:
    policy = RestartPolicy(max_restarts=max_restarts)
    machine = Supervision(policy)
    now, restarts, incarnations = 0.0, [], [0]
    for gap in gaps:
        now += gap
        if runs:
            machine.started(now - gap / 2)
        delay_s = machine.failed(now)
        if delay_s is None:
            assert machine.num_failures == max_restarts + 1
            break
        assert policy.first_delay_s <= delay_s <= policy.max_delay_s
        restarts.append(now)
        incarnations.append(machine.incarnation)
    for end in restarts:
        assert sum(end - policy.window_s <= at <= end for at in restarts) <= max_restarts
    assert incarnations == list(range(len(incarnations)))
