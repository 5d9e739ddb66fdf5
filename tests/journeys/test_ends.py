"""Every ordinary way to end a run ends it well: signals of people, terminals and systems, to any of its processes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlzmq.actors.process_state import FORK_SERVER_NAME
from rlzmq.core.run_dir import find_checkpoint
from tests.journeys.terminal import Command, Done, Terminal, until

TINY = (
    "--envs-per-env-runner 1 --seed 1 --preset none --min-time-s-per-iteration 0 "
    "--min-sample-timesteps-per-iteration 0"
)
SMALL = {
    "ppo": f"{TINY} --batch-size-per-learner 64 --minibatch-size 32 --num-epochs 1",
    "appo": f"{TINY} --batch-size-per-learner 64",
    "dqn": f"{TINY}",
}


def train(
    terminal: Terminal, more: str = "--env-runners 1 --learners 2", algorithm: str = "ppo", **options: object
) -> Command:
    line = f"rlzmq train {algorithm} --env CartPole-v1 {SMALL[algorithm]} --run-dir r {more}"
    return terminal.start(line, **options)


def assert_nothing_lost(terminal: Terminal, done: Done, code: int = 75) -> None:
    """The exit code is as documented, and the newest checkpoint has everything that was trained."""
    assert done.code == code, done
    rows = [json.loads(line) for line in (terminal.cwd / "r/metrics.jsonl").read_text().splitlines()]
    found = find_checkpoint(terminal.cwd / "r")
    assert found.path is not None, done
    assert not found.skipped, found.skipped
    assert int(found.path.name) >= rows[-1]["training_iteration"], done


def fork_server(command: Command) -> psutil.Process | None:
    for process in command.family():
        try:
            if process.name() == FORK_SERVER_NAME:
                return process
        except psutil.NoSuchProcess:
            continue
    return None


@pytest.mark.parametrize(
    ("algorithm", "processes"),
    [
        ("ppo", "--env-runners 1 --learners 2"),
        ("appo", "--env-runners 1 --learners 1"),
        ("dqn", "--env-runners 1 --learners 0"),
    ],
)
def test_all_processes_of_a_run_are_told_to_end_at_once(
    algorithm: str, processes: str, terminal: Terminal
) -> None:
    run = train(terminal, processes, algorithm)
    run.wait_for("iter 1 ")
    for _ in range(3):  # some systems repeat it
        run.signal_all(signal.SIGTERM)
    assert_nothing_lost(terminal, run.end())


def test_any_mixture_of_signals_to_any_processes(terminal: Terminal) -> None:
    run = train(terminal, "--env-runners 1 --learners 1")
    run.wait_for("iter 1 ")
    others = run.family()[1:]
    metrics = terminal.cwd / "r/metrics.jsonl"
    num_iterations = metrics.read_text().count("\n")

    def signal_others() -> bool:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            for process in others:
                process.send_signal(number)
        return metrics.read_text().count("\n") > num_iterations + 30

    until(signal_others, "the run to go on")
    assert {process.pid for process in others} <= {process.pid for process in run.family()}, (
        f"one was replaced: {run.err}"
    )
    run.signal(signal.SIGUSR1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        run.signal_all(number)
    assert_nothing_lost(terminal, run.end())


def test_a_terminal_that_is_closed(terminal: Terminal) -> None:
    """The panel is drawn on it until it is gone: writing to it fails then."""
    emulator, tty = pty.openpty()
    run = terminal.start(
        f"rlzmq train ppo --env CartPole-v1 {SMALL['ppo']} --run-dir r --env-runners 0",
        warm=False,
        stdin=tty,
        stdout=tty,
        stderr=tty,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY),
    )
    os.close(tty)
    metrics = terminal.cwd / "r/metrics.jsonl"
    until(lambda: metrics.is_file() and metrics.read_text(), "an iteration")
    os.close(emulator)
    assert_nothing_lost(terminal, run.end())


def test_a_reader_that_ends(terminal: Terminal) -> None:
    """``rlzmq train … | tee log``, whose ``tee`` ends first."""
    reader, writer = os.pipe()
    run = train(terminal, "--env-runners 0", stdout=writer)
    os.close(writer)
    metrics = terminal.cwd / "r/metrics.jsonl"
    until(lambda: metrics.is_file() and metrics.read_text(), "an iteration")
    os.close(reader)
    assert_nothing_lost(terminal, run.end())


def test_a_signal_in_the_first_moments(terminal: Terminal) -> None:
    """While Python still imports rlzmq, while the first processes start, and when the run says that it starts."""
    moments: tuple[Callable[[Command], object], ...] = (handles_signals, fork_server, lambda run: run.out)
    for has_come in moments:
        run = train(terminal, warm=False)
        until(lambda has_come=has_come, run=run: has_come(run), "the moment")
        run.signal(signal.SIGTERM)
        assert run.end().code == 75


NEVER_MADE = """
import threading
from pathlib import Path

import gymnasium as gym

class Env(gym.Wrapper):
    def __init__(self, config):
        super().__init__(gym.make("CartPole-v1"))
        if config.vector_index == 2:
            Path("hangs").touch()
            threading.Event().wait()
"""


def test_ctrl_c_while_environments_are_made_in_processes_of_their_own(terminal: Terminal) -> None:
    (terminal.cwd / "mine.py").write_text(NEVER_MADE)
    run = terminal.start(
        f"rlzmq train ppo --env mine:Env {TINY} --env-runners 0 --envs-per-env-runner 3 --gym-env-vectorize-mode async"
    )
    until((terminal.cwd / "hangs").exists, "the third environment")
    run.signal_all(signal.SIGINT)
    done = run.end()
    assert (done.code, done.err) == (130, "")
    assert done.out.endswith("\ninterrupted\n"), done


def test_ctrl_c_during_the_first_import_prints_no_traceback() -> None:
    """The interpreter reports each module that it has imported; the first of rlzmq's is the moment."""
    argv = [sys.executable, "-X", "importtime", "-m", "rlzmq", "doctor"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        next(line for line in command.stderr if "rlzmq.core" in line)
        command.send_signal(signal.SIGINT)
        rest = command.stderr.read()
    assert command.returncode in (130, -signal.SIGINT)  # either is 130 in a shell
    assert "Traceback" not in rest


def handles_signals(run: Command) -> bool:
    for line in Path(f"/proc/{run.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))
    return False


@pytest.mark.slow
def test_a_fork_server_that_is_killed_while_it_imports_again_and_again(terminal: Terminal) -> None:
    run = train(terminal, "--env-runners 1 --learners 1 --stop iterations=1", warm=False)
    killed: set[int] = set()

    def kill_next() -> bool:
        server = fork_server(run)
        if server is not None and server.pid not in killed:
            killed.add(server.pid)
            server.kill()
        return len(killed) == 7

    until(kill_next, "the seventh fork server")
    assert_nothing_lost(terminal, run.end(), 0)


MINE = """
import time
from pathlib import Path

import gymnasium as gym

class Env(gym.Wrapper):
    def __init__(self, config):
        super().__init__(gym.make("CartPole-v1"))
        self.is_slow = config["is_slow"]

    def step(self, action):
        time.sleep(0.02 if self.is_slow and not Path("go").exists() else 0.0)
        return super().step(action)
"""
SPACE = """
trainable = "PPO"
environment = { env = "mine:Env", env_config = { is_slow = { grid_search = [false, false, true] } } }
env_runners = { num_env_runners = 0 }
training = { train_batch_size_per_learner = 64, minibatch_size = 32, num_epochs = 1 }
stop = { training_iteration = 10 }
"""


def test_a_search_whose_processes_are_all_told_to_end_is_resumed(terminal: Terminal) -> None:
    """One trial has ended by then, one is in the middle."""
    (terminal.cwd / "mine.py").write_text(MINE)
    (terminal.cwd / "space.toml").write_text(SPACE)
    tune = "rlzmq tune space.toml --dir . --name s --preset none --max-concurrent-trials 2"
    search = terminal.start(tune)
    trials = [terminal.cwd / "s" / f"PPO_0000{index}" for index in range(3)]
    ended = search.wait_for(r"PPO_0000(\d) terminated")[1]
    until(lambda: iterations(trials[2]), "results of the last trial")
    search.signal_all(signal.SIGTERM)
    done = search.end()
    assert done.code == 75, done
    before = [iterations(trial) for trial in trials]
    assert len(before[int(ended)]) == 10 > len(before[2]), done
    for trial, trained in zip(trials, before, strict=True):
        newest = json.loads((trial / "checkpoints.json").read_text())
        assert str(trained[-1]) in str(newest), (trained, newest)
    again = re.search("^resume +(.*)", done.out, re.MULTILINE)
    assert again is not None, done
    assert again[1] == f"{tune} --resume"
    (terminal.cwd / "go").touch()
    done = terminal.type(again[1])
    assert done.code == 0, done
    assert "3 trials ended, 0 failed" in done.out
    for trial, trained in zip(trials, before, strict=True):
        assert iterations(trial) == list(range(1, 11)), (trained, done)


def iterations(trial: Path) -> list[int]:
    """Return the iterations that a trial has reported, each once."""
    file = trial / "result.json"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line)["training_iteration"] for line in lines]


SCRIPT = """
from pathlib import Path
from rlzmq import PPOConfig

config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=1).learners(num_learners=1)
config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
with config.build() as algo:
    algo.keep_checkpoints("r/checkpoints")
    try:
        while True:
            print("iteration", algo.train()["training_iteration"], flush=True)
    except KeyboardInterrupt:
        print("saved", algo.save_checkpoint(), "of", algo.iteration, flush=True)
"""


def test_ctrl_c_in_a_script_is_the_script_s_alone(terminal: Terminal) -> None:
    script = terminal.start(f"python -c {shlex.quote(SCRIPT)}")
    script.wait_for("iteration 2")
    script.signal_all(signal.SIGINT)
    done = script.end()
    assert done.code == 0, done
    assert re.search(r"saved .*/r/checkpoints/0*(\d+) of \1\n", done.out), done
