"""What a person does wrong first: an env that never ends, or returns the wrong things; what is recorded is kept."""

from __future__ import annotations

import re
import signal

import pytest

from rlzmq.replay.shards import open_shards
from tests.journeys.terminal import Terminal

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
TRAIN = "rlzmq train ppo --quiet --train-batch-size-per-learner 32 --minibatch-size 32 --num-epochs 1"


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
    done = place.type(f"{TRAIN} --env mine:{env} --env-runners 1 --stop iterations=1")
    assert done.code == 70, done
    assert said in done.err.splitlines()[-1].replace(f"{place.cwd}/", ""), done
    assert done.err.count("Error") <= 4, done
    assert "rlzmq/envs" not in done.err, done


def test_an_env_that_never_ends_is_named_while_it_is_waited_for(place: Terminal) -> None:
    hint = r"No episode has ended in \d+ env steps.* limit them: .*TimeLimit"
    train = f"{TRAIN} --env mine:Endless --env-runners 0 --evaluation-sample-timeout-s 0.2 --run-dir runs/a"
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
        place.type(f"{TRAIN} --env mine:Base --env-runners 0 --run-dir runs/a --stop iterations=1").code == 0
    )
    record = place.start("rlzmq record runs/a -o data --episodes 1000000")
    record.wait_for(r"recorded  \d+ of 1000000 episodes in \d+ s\n")
    record.signal(signal.SIGINT)
    done = record.end()
    assert done.code == 130, done
    kept = re.search(r"recorded  (\d+) episodes, return mean 10.00, in data$", done.out.strip())
    assert kept, done
    assert sum(map(len, open_shards(place.cwd / "data").shards)) == int(kept[1])
