"""What a signal does to a command at work: in this process, and in one that it ends on the spot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlzmq.cli.interrupt import Interrupt


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    with Interrupt(drain_s={signal.SIGTERM: 0.05}) as interrupt:
        interrupt.ends_at_once = False
        yield interrupt


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)]
)
def test_the_first_signal_only_asks_and_the_second_ends(
    number: signal.Signals, code: int, interrupt: Interrupt
) -> None:
    asked = []
    interrupt.on_first = lambda: asked.append(1)
    assert interrupt.exit_code == 0
    signal.raise_signal(number)
    assert (interrupt.is_set, interrupt.exit_code, asked) == (True, code, [1])
    signal.raise_signal(number)  # the echo of a wrapper such as `uv run`
    assert interrupt.num_signals == 1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT if number != signal.SIGINT else signal.SIGTERM)
    assert interrupt.exit_code == code, "the first one counts"


def test_a_signal_that_comes_again_later_is_no_echo(
    interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("rlzmq.cli.interrupt.time.monotonic", lambda: now)
    signal.raise_signal(signal.SIGINT)
    now += 0.3
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_work_that_does_not_end_is_interrupted(interrupt: Interrupt) -> None:
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.sigtimedwait([], 10.0)


def test_the_orderly_end_itself_is_not_interrupted(interrupt: Interrupt) -> None:
    signal.raise_signal(signal.SIGTERM)
    with interrupt.shielded():
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


STARTED = "i.ends_at_once = False; i.last_words = 'resume it so' + chr(10)"


@pytest.mark.parametrize(
    ("when", "code", "words"),
    [
        ("", 75, "interrupted before it began"),
        (
            f"{STARTED}; os.kill(os.getpid(), 15)\n    with i.shielded(0.05): time.sleep(60)",
            75,
            "resume it so",
        ),
        (
            f"{STARTED}; os.kill(os.getpid(), 2)\n    with i.shielded(0.05): time.sleep(60)",
            130,
            "resume it so",
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
