"""Classes and functions of the user's own script work with local processes, however the script is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEFINITIONS = """
import gymnasium as gym
import numpy as np
import torch

from rlzmq import Callback, Columns, ConnectorV2, PPOConfig, RLModuleSpec, TorchRLModule, ValueFunctionAPI

LENGTH = 10


class Countdown(gym.Env):
    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config=None):
        pass

    def observe(self):
        return np.array([self.left / LENGTH], np.float32)

    def reset(self, *, seed=None, options=None):
        self.left = LENGTH
        return self.observe(), {}

    def step(self, action):
        self.left -= 1
        return self.observe(), float(action), self.left == 0, False, {}


class Linear(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        self.pi, self.vf = torch.nn.Linear(1, 2), torch.nn.Linear(1, 1)

    def _forward(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self.pi(batch[Columns.OBS])}

    def compute_values(self, batch, embeddings=None):
        return self.vf(batch[Columns.OBS]).squeeze(-1)


class Halved(ConnectorV2):
    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            episode.set_rewards(new_data=episode.get_rewards() / 2)
        return batch


class Count(Callback):
    def on_episode_end(self, *, metrics_logger, **kwargs):
        metrics_logger.log_value("ended", 1, reduce="sum")


def with_halves(observation_space, action_space):
    return Halved()


config = (
    PPOConfig()
    .environment(Countdown)
    .env_runners(num_env_runners=1, num_envs_per_env_runner=2)
    .learners(num_learners=1, learner_connector=with_halves)
    .rl_module(rl_module_spec=RLModuleSpec(module_class=Linear))
    .training(train_batch_size_per_learner=80, minibatch_size=40, num_epochs=1)
    .callbacks(Count, on_train_result=lambda *, result, **kwargs: result.update(seen=LENGTH))
    .debugging(seed=1)
)


def report(result):
    print("trained", result["accounting"]["trained"], result["seen"], result["env_runners"]["ended"] > 0)
"""

SYNC = """
with config.build() as algo:
    report(algo.train())
"""

IN_A_RUNNING_LOOP = """
import asyncio


async def cell():
    with config.build() as algo:
        report(algo.train())


asyncio.run(cell())
"""

ASYNC = """
import asyncio


async def main():
    async with config.build_async() as algo:
        report(await algo.train())


asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "ending"),
    [("file", SYNC), ("-c", IN_A_RUNNING_LOOP), ("stdin", ASYNC)],
    ids=["a script without a guard", "python -c, inside a running loop", "stdin, async"],
)
def test_a_script_needs_no_guard_and_no_module_of_its_own(how: str, ending: str, tmp_path: Path) -> None:
    code = DEFINITIONS + ending
    if how != "file":
        code = code.replace("num_learners=1", "num_learners=0")  # fewer processes; one case has them all
    script = tmp_path / "script.py"
    script.write_text(code)
    arguments = {"file": [str(script)], "-c": ["-c", code], "stdin": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        input=code if how == "stdin" else "",
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 80 10 True\n"
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "script.py"] == []
