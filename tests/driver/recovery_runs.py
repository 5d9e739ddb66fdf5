"""Small runs that are hurt on purpose, and what every one of them must still keep."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import gymnasium as gym
import numpy as np

from tests.support.runs import ShortEnv, assert_accounted
from tests.support.runs import small as small_run

BATCH = 240


def small(num_env_runners: int, num_learners: int, **settings: Any) -> Any:
    return small_run(
        num_env_runners=num_env_runners,
        num_envs_per_env_runner=4,
        num_learners=num_learners,
        train_batch_size_per_learner=BATCH // max(num_learners, 1),
        **{"minibatch_size": 40, "num_epochs": 2, "lr": 1e-3, **settings},
    )


class LargeObservations(ShortEnv):
    """32 kB per observation, which say where the episode is."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (8192,), np.float32)

    def step(self, action: Any) -> Any:
        return *super().step(action)[:2], False, self.t >= 25, {}

    def observation(self) -> Any:
        return self.np_random.uniform(-1, 1, 8192).astype(np.float32)

    def reward(self, action: Any) -> float:
        return float(action)


def large(num_env_runners: int, num_learners: int) -> Any:
    """Fragments and weights of more than 1 MB, so that runners use the segments of the weights themselves."""
    config = small(num_env_runners, num_learners).environment(LargeObservations)
    return config.rl_module(model_config={"fcnet_hiddens": [40]})


def check_account(result: dict[str, Any], num_updates: int) -> None:
    """Every update trained its whole batch, and every sampled step is accounted for."""
    assert assert_accounted(result)["trained"] >= num_updates * BATCH


async def kill(handle: Any, number: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal, and make sure that it ended the process (a stopped one: that its supervisor did)."""
    handle.send_signal(number)
    async with asyncio.timeout(60):
        status = await handle.exited
    assert status.signal_number == signal.SIGKILL
