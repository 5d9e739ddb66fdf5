"""User code that returns the wrong things, raises what is no error, or never returns, is named; recordings are kept."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal

import pytest

from rlzmq.core.run_dir import find_checkpoint
from rlzmq.replay.shards import open_shards
from tests.journeys.terminal import Done, Terminal, until

TINY = "--train-batch-size-per-learner 32 --minibatch-size 32 --num-epochs 1"
TRAIN = f"rlzmq train ppo --quiet {TINY} --stop iterations=3"

MINE = """
import asyncio
import os
import sys
import time

import gymnasium as gym
import numpy as np

from rlzmq import PPOConfig

class Mine(BaseException):
    pass

RAISED = {
    "cancelled": asyncio.CancelledError, "generator": GeneratorExit, "interrupt": KeyboardInterrupt, "mine": Mine,
}


class Env(gym.Env):
    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    num_made = 0

    def __init__(self, config):
        self.config = dict(config)
        self.num_steps = 0
        Env.num_made += 1
        if Env.num_made == 2 and self.config.get("hangs") != "everywhere":
            self.fail("second constructor")
        self.fail("constructor")

    def fail(self, place):
        while self.config.get("hangs") in (place, "everywhere") and not os.path.exists(f"after {place}"):
            time.sleep(0.02)
        if self.config.get("place") == place:
            raise RAISED[self.config["raises"]]()

    def reset(self, *, seed=None, options=None):
        self.fail("reset")
        if "says" in self.config:
            print("to stdout \\x1b]0;mine\\x07", flush=True)
            print("to stderr \\x1b]0;mine\\x07\\r", file=sys.stderr)
        self.left = 5
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        self.left -= 1
        if self.num_steps == 40:
            self.fail("step")
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}

    def close(self):
        self.fail("close")
"""


@pytest.fixture
def mine(terminal: Terminal) -> Terminal:
    """A terminal in a directory with the user's module."""
    (terminal.cwd / "mine.py").write_text(MINE)
    return terminal


def names_the_code(done: Done, place: str, name: str) -> bool:
    """Return whether an ended run blames a place in the user's module, and says so in its last line."""
    last = done.err.splitlines()[-1]
    return done.code == 70 and f"in {place}" in done.err and "mine.py:" in last and name in last


@pytest.mark.parametrize(
    ("where", "place", "raises", "name"),
    [
        ("--num-env-runners 1", "step", "cancelled", "CancelledError"),
        ("--num-env-runners 1 --gym-env-vectorize-mode async", "step", "mine", "Mine"),
        ("--num-env-runners 0 --num-learners 1", "reset", "generator", "GeneratorExit"),
        ("--num-env-runners 0", "step", "interrupt", "KeyboardInterrupt"),
    ],
)
def test_an_env_that_raises_no_error_is_named(
    mine: Terminal, where: str, place: str, raises: str, name: str
) -> None:
    config = f"--env mine:Env --env-config place={place} --env-config raises={raises}"
    done = mine.type(f"{TRAIN} {where} {config}")
    assert names_the_code(done, place, name), done


SCRIPT = """
import asyncio
import sys
from pathlib import Path

import mine
from rlzmq import PPOConfig


def wait(*args, **kwargs):
    mine.Env({"hangs": "function"}).fail("function")
    return {}, 0, 0


async def fail(**kwargs):
    while not Path("after function").exists():
        await asyncio.sleep(0.02)


config = PPOConfig().environment(mine.Env).env_runners(num_env_runners=1).learners(num_learners=0)
config.training(train_batch_size_per_learner=32, minibatch_size=32, num_epochs=1)
config.fault_tolerance(slow_call_warning_s=0.5)
if sys.argv[1] == "evaluates":
    config.evaluation(evaluation_interval=1, custom_evaluation_function=wait)
elif sys.argv[1] == "awaits":
    config.callbacks(on_train_result=[lambda **kwargs: None, fail])
else:
    config.callbacks(on_train_result=wait).fault_tolerance(driver_call_timeout_s=1.0)
if __name__ == "__main__":
    with config.build() as algo:
        algo.keep_checkpoints("checkpoints")
        algo.train()
    print("trained")
"""


@pytest.fixture
def scripted(mine: Terminal) -> Terminal:
    """A terminal with a training script beside the user's module."""
    (mine.cwd / "run.py").write_text(SCRIPT)
    return mine


@pytest.mark.parametrize(
    ("does", "what", "file"),
    [("evaluates", "custom_evaluation_function", "mine"), ("awaits", "on_train_result", "run")],
)
def test_a_function_in_the_driver_that_does_not_return_is_named_again_and_again(
    does: str, what: str, file: str, scripted: Terminal
) -> None:
    run = scripted.start(f"python run.py {does}")
    warning = rf"{what} has not returned for \d+ s; [^\n]* \S+{file}\.py:\d+ in fail"
    until(lambda: len(re.findall(warning, run.err)) > 1, "a second warning", lambda: run.err)
    assert "run.py" in run.err
    (scripted.cwd / "after function").touch()
    done = run.end()
    assert (done.code, done.out) == (0, "trained\n"), done


def test_a_run_may_end_because_of_a_function_that_does_not_return(scripted: Terminal) -> None:
    done = scripted.type("python run.py ends")
    assert done.code == 70, done
    last = done.err.splitlines()[-1]
    assert "on_train_result has not returned" in last, done
    assert "checkpoints/000001" in last, done
    assert find_checkpoint(scripted.cwd / "checkpoints").path is not None


def test_an_env_in_the_driver_that_does_not_return_is_named_in_a_quiet_run(mine: Terminal) -> None:
    config = "--env mine:Env --env-config hangs=everywhere --slow-call-warning-s 0.5"
    run = mine.start(f"{TRAIN} --num-env-runners 0 {config}")
    for place, function in (
        ("constructor", "__init__"),
        ("close", "close"),  # of the env that was made for its spaces
        ("reset", "reset"),
        ("step", "step"),
    ):
        run.wait_for(rf"in {function}\n +self\.fail\(\"{place}\"\)")
        (mine.cwd / f"after {place}").touch()
    assert run.end().code == 0


def test_a_serial_run_may_end_because_of_its_env(mine: Terminal) -> None:
    limits = "--driver-call-timeout-s 1 --run-dir runs/a"
    done = mine.type(f"{TRAIN} --num-env-runners 0 --env mine:Env --env-config hangs=step {limits}")
    assert done.code == 70, done
    assert "runs/a/checkpoints/000001" in done.err.splitlines()[-1], done


def test_an_env_that_is_made_in_the_driver_for_ever_is_named_and_ends_the_run(mine: Terminal) -> None:
    limits = "--env-step-timeout-s 0.5 --env-reset-timeout-s 0.5 --process-start-timeout-s 2"
    config = "--env mine:Env --env-config 'hangs=second constructor' --num-env-runners 0 --num-learners 1"
    done = mine.type(f"{TRAIN} {config} {limits}")
    assert done.code == 70, done
    assert re.search(r"env runner 0 hangs: making .*mine\.py:\d+ in fail", done.err), done
    assert "process_start_timeout_s" in done.err, done
    assert "was not ready" in done.err.splitlines()[-1], done
    assert "AttributeError" not in done.err, done


def test_what_an_env_runner_writes_does_not_command_the_terminal(mine: Terminal) -> None:
    emulator, tty = pty.openpty()
    config = "--env mine:Env --env-config says=mine --num-env-runners 1"
    run = mine.start(f"{TRAIN} {config}", stdin=tty, stdout=tty, stderr=tty)
    os.close(tty)
    written = b""
    with (
        contextlib.suppress(OSError),
        open(emulator, "rb", buffering=0) as terminal,
    ):  # EIO: nobody writes any more
        while data := terminal.read(1000):
            written += data
    assert run.end().code == 0, written
    for stream in (b"stdout", b"stderr"):
        assert rb"[runner-0] to %s \x1b]0;mine\x07" % stream + b"\r\n" in written, written
    assert b"\x1b]0;" not in written


SLOW = """
import time
import gymnasium as gym

class Slow(gym.Wrapper):
    def __init__(self, config):
        time.sleep(0.25)
        super().__init__(gym.make("CartPole-v1"))
"""


@pytest.mark.parametrize("num_runners", [0, 1])
def test_making_many_slow_environments_shows_progress(terminal: Terminal, num_runners: int) -> None:
    (terminal.cwd / "slow.py").write_text(SLOW)
    many = f"--env slow:Slow --env-runners {num_runners} --envs-per-env-runner 14"
    done = terminal.type(f"rlzmq train ppo {many} {TINY} --stop iterations=1")
    assert done.code == 0, done
    assert re.search(r"made \d+ of 14 environments in \d s", done.err), done


ENVS = """
import gymnasium as gym
import numpy as np


class Base(gym.Env):
    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    length = 10

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == self.length, False, {}


class Endless(Base):
    length = None


class FourValues(Base):
    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, {}


class NoServer(Base):
    def __init__(self):
        raise RuntimeError("the server is down")


class TwoForThree(Base):
    observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
"""
MISTAKEN = "rlzmq train ppo --quiet --train-batch-size-per-learner 32 --minibatch-size 32 --num-epochs 1"


@pytest.fixture
def place(terminal: Terminal) -> Terminal:
    """A terminal in a directory with the envs."""
    (terminal.cwd / "mine.py").write_text(ENVS)
    return terminal


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("FourValues", "(observation, reward, terminated, truncated, info). Correct mine:FourValues."),
        ("NoServer", "the server is down (mine.py:31 in __init__)"),
        ("TwoForThree", "an observation has shape (2,), expected (3,)"),
    ],
)
def test_an_env_with_another_interface_is_told_once_what_to_return(
    env: str, said: str, place: Terminal
) -> None:
    done = place.type(f"{MISTAKEN} --env mine:{env} --env-runners 1 --stop iterations=1")
    assert done.code == 70, done
    assert said in done.err.splitlines()[-1].replace(f"{place.cwd}/", ""), done
    assert done.err.count("Error") <= 4, done
    assert "rlzmq/envs" not in done.err, done


def test_an_env_that_never_ends_is_named_while_it_is_waited_for(place: Terminal) -> None:
    hint = r"No episode has ended in \d+ env steps.* limit them: .*TimeLimit"
    train = (
        f"{MISTAKEN} --env mine:Endless --env-runners 0 --evaluation-sample-timeout-s 0.2 --run-dir runs/a"
    )
    assert place.type(f"{train} --stop iterations=1").code == 0
    commands = [
        place.start("rlzmq evaluate runs/a"),
        place.start("rlzmq train ppo --resume runs/a --evaluation-interval 1"),
    ]
    for command in commands:
        command.wait_for(hint)
        command.signal(signal.SIGINT)
        assert command.end().code == 130


def test_ctrl_c_keeps_what_is_recorded(place: Terminal) -> None:
    assert (
        place.type(f"{MISTAKEN} --env mine:Base --env-runners 0 --run-dir runs/a --stop iterations=1").code
        == 0
    )
    record = place.start("rlzmq record runs/a -o data --episodes 1000000")
    record.wait_for(r"recorded  \d+ of 1000000 episodes in \d+ s\n")
    record.signal(signal.SIGINT)
    done = record.end()
    assert done.code == 130, done
    kept = re.search(r"recorded  (\d+) episodes, return mean 10.00, in data$", done.out.strip())
    assert kept, done
    assert sum(map(len, open_shards(place.cwd / "data").shards)) == int(kept[1])
