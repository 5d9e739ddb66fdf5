"""How long nothing may come, by the worker's own pace in time that the machine gave; interrupts within calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlzmq.cli.interrupt import Interrupt
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import ExitRaisedError, Interrupted
from rlzmq.core.patience import FACTOR, CoreWait, FairClock, Patience


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


def test_an_interrupt_in_the_main_thread_is_ctrl_c_and_anywhere_else_an_error() -> None:
    watch = CallWatch()
    with pytest.raises(KeyboardInterrupt), watch.call("a callback"):
        raise KeyboardInterrupt
    raised: list[BaseException] = []

    def call() -> None:
        try:
            with watch.call("a callback"):
                raise KeyboardInterrupt
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(raised[0], ExitRaisedError)


def test_a_command_knows_its_interrupts_from_those_of_user_code() -> None:
    watch = CallWatch()
    with Interrupt(drain_s={}) as interrupt:
        with pytest.raises(ExitRaisedError), watch.call("an environment"):
            raise KeyboardInterrupt
        interrupt.ends_at_once, interrupt.on_first = False, interrupt.raise_now
        with pytest.raises(Interrupted), watch.call("an environment"):
            signal.raise_signal(signal.SIGTERM)
