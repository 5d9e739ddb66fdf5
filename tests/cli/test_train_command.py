"""The train and evaluate commands: files, exit codes; what a signal does to a command at work."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import psutil
import pytest

from rlzmq import PPO
from rlzmq.cli.interrupt import Interrupt
from rlzmq.cli.main import main
from rlzmq.core.process import ENDING_SIGNALS
from tests.support.runs import Command, small

TRAIN = [
    "train", "ppo", "--env", "CartPole-v1", "--envs-per-env-runner", "4", "--batch-size-per-learner", "200",
    "--minibatch-size", "50", "--num-epochs", "1", "--seed", "3", "--preset", "none",
]  # fmt: skip


MY_ENVS = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Walk(CartPoleEnv):
    pass

gym.register(id="Walk-v0", entry_point="my_envs:Walk")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module of the user's, as it is for the installed command: not on the path."""
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("my_envs", None)
    gym.registry.pop("Walk-v0", None)


def test_a_signal_while_learners_are_waited_for_leaves_no_keys_behind(tmp_path: Path) -> None:
    distributed = ["--listen", "tcp://127.0.0.1:0", "--learners", "1", "--num-remote-learners", "1"]
    arguments = [*TRAIN, *distributed, "--env-runners", "1", "--join-file", str(tmp_path / "join.toml")]
    train = Command(tmp_path, *arguments)
    train.wait_for("waiting for learners:")
    family = psutil.Process(train.process.pid).children(recursive=True)
    assert sorted(tmp_path.glob("join*.toml"))
    train.process.send_signal(signal.SIGTERM)
    assert train.end() == 75, train.output
    assert train.output.endswith("interrupted\n")
    assert sorted(tmp_path.glob("join*.toml")) == []
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert not list(tmp_path.glob("rlzmq*"))


def test_modules_of_the_current_directory_are_found_and_the_printed_commands_work(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "ppo", "--env", "my_envs:Walk", "--steps", "1"]) == 0
    gym.registry.pop("Walk-v0")
    sys.modules.pop("my_envs")
    own = ["--env", "Walk-v0", "--import", "my_envs", "--env-runners", "1", "--lr", "0.125"]
    assert main([*TRAIN, *own, "--stop", "iterations=1", "--run-dir", "my run"]) == 0
    printed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if " rlzmq " in line)
    assert main([*shlex.split(printed["evaluate"])[1:], "--episodes", "1"]) == 0
    more = ["--env-runners", "0", "--stop", "iterations=2", "--run-dir", "r2"]
    assert main([*shlex.split(printed["resume"])[1:], *more]) == 0
    assert "lr = 0.125" in (here / "r2" / "config.toml").read_text()
    assert json.loads((here / "r2" / "metrics.jsonl").read_text())["training_iteration"] == 2


def test_bad_run_directories_configs_and_checkpoints_are_named_before_anything_is_built(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(config: object, checkpoint: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("rlzmq.cli.train._build", build)
    assert main([*TRAIN, "--run-dir", "/proc/x", "--quiet"]) == 78
    assert "cannot write to the run directory /proc/x" in capsys.readouterr().err
    (here / "bin.toml").write_bytes(b"\xff\xfe")
    assert main([*TRAIN, "--config", "bin.toml"]) == 78
    assert "Cannot read bin.toml" in capsys.readouterr().err
    (here / "torn").mkdir()
    (here / "torn" / "manifest.json").write_text("{")
    assert main(["train", "ppo", "--resume", "torn"]) == 78
    said = capsys.readouterr().err
    assert "torn is neither a complete checkpoint nor" in said
    assert f"{here / 'torn'}: " in said, "with the reason"
    assert main(["train", "ppo", "--resume", "auto", "--run-dir", "torn"]) == 78
    assert f"{here / 'torn'}: " in capsys.readouterr().err, (
        "without --env, there are no settings for a new run"
    )
    (here / "torn").rename(here / "000001")
    assert main([*TRAIN, "--resume", "auto", "--run-dir", "."]) == 78
    printed = capsys.readouterr()
    assert "starting a new run" not in printed.out
    assert "none of its checkpoints can be used" in printed.err
    assert main([*TRAIN, "--run-dir", "gone/deep", "--quiet"]) == 70
    assert not (here / "gone").exists()


def test_settings_are_resumed_by_the_algorithm_that_has_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mine(PPO):
        pass

    with Mine(small()) as algo:
        algo.save_to_path("saved")
    assert main(["train", "dqn", "--resume", "saved"]) == 78
    said = capsys.readouterr().err
    assert "settings of PPO, which DQN does not have: rlzmq train ppo --resume saved" in said
    assert main(["train", "ppo", "--resume", "saved", "--stop", "iterations=1", "--quiet"]) == 0


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
