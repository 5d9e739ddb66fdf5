"""What a signal does to a command at work: in this process, and in one that it ends on the spot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlzmq.cli.interrupt import Interrupt
from rlzmq.core.process import ENDING_SIGNALS


class Clock:
    """The time that an Interrupt reads."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rlzmq.cli.interrupt.time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    with Interrupt(drain_s={signal.SIGTERM: 0.05}) as interrupt:
        interrupt.ends_at_once = False
        yield interrupt


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_the_first_signal_only_asks_and_others_change_nothing(
    number: signal.Signals, clock: Clock, interrupt: Interrupt
) -> None:
    asked = []
    interrupt.on_first = lambda: asked.append(1)
    assert interrupt.exit_code == 0
    for other in (number, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        clock.now += 100.0
        signal.raise_signal(other)
        assert (interrupt.is_set, asked) == (True, [1])
        assert interrupt.exit_code == (130 if number == signal.SIGINT else 75), "the first one counts"


def test_a_second_ctrl_c_that_is_no_echo_does_not_wait_for_the_work(
    clock: Clock, interrupt: Interrupt
) -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # the echo of a wrapper such as `uv run`
    clock.now += 0.3
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    clock.now += 0.3
    signal.raise_signal(signal.SIGINT)  # nothing more: the end is on its way


def test_nohup_stays_in_force() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt(drain_s={}) as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.is_set
    finally:
        signal.signal(signal.SIGHUP, former)


LATE = """
import os, signal, sys
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)
last = Last()
from rlzmq.__main__ import main
sys.argv[1:] = ["--version"]
sys.exit(main())
"""


def test_a_signal_while_the_interpreter_ends_changes_no_exit_code() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], check=False, timeout=60).returncode == 0


def test_work_that_does_not_end_is_interrupted(interrupt: Interrupt) -> None:
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.sigtimedwait([], 10.0)


WORDS, WAITS = "resume it so", "with i.shielded(0.05): time.sleep(60)"
STARTED = "i.ends_at_once = False; i.last_words = 'resume it so' + chr(10)"


@pytest.mark.parametrize(
    ("when", "code", "words"),
    [
        ("", 75, "interrupted before it began"),
        *[
            (f"{STARTED}; os.kill(os.getpid(), {signal})\n    {WAITS}", code, WORDS)
            for signal, code in ((15, 75), (2, 130))
        ],
        (
            f"{STARTED}; os.kill(os.getpid(), 15)\n    now = time.monotonic\n"
            "    time.monotonic = lambda: now() + 11\n    with i.shielded(): os.kill(os.getpid(), 2)",
            75,
            WORDS,
        ),
    ],
)
def test_a_process_ends_on_the_spot_before_it_has_begun_and_when_its_end_takes_too_long(
    when: str, code: int, words: str
) -> None:
    program = (
        "import os, time\nfrom rlzmq.cli.interrupt import Interrupt\n"
        f"with Interrupt(drain_s={{}}) as i:\n    {when or 'os.kill(os.getpid(), 10)'}\n    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ}, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout.decode()) == (code, f"{words}\n"), done.stderr
