"""What is sampled is trained: no env step is lost where episodes end, before replay buffers or on-policy."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import DQNConfig, PPOConfig


class EndsSoon(gym.Env[np.ndarray, int]):
    """Episodes of 1 to 39 steps, 20 in the mean; the observation is the number of steps so far."""

    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._num_steps, self._length = 0, int(self.np_random.integers(1, 40))
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self._num_steps += 1
        observation = np.array([self._num_steps], np.float32)
        return observation, 1.0, self._num_steps >= self._length, False, {}


def dropped(config: Any, num_updates: int) -> tuple[int, int]:
    """Return the env steps sampled and dropped."""
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0).debugging(seed=5)
    with config.rl_module(model_config={"fcnet_hiddens": [8]}).build() as algo:
        for _ in range(num_updates):
            account = algo.train()["accounting"]
    assert account["pending"] == 0 or config.num_env_runners
    return account["sampled"], sum(account["dropped"].values())


@pytest.mark.parametrize("num_envs", [4, 32])
def test_a_replay_buffer_gets_every_step(num_envs: int) -> None:
    config = DQNConfig().environment(EndsSoon)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs, rollout_fragment_length=1)
    config.training(num_steps_sampled_before_learning_starts=10_000)
    num_sampled, num_dropped = dropped(config, 40)
    assert num_sampled >= 40 * num_envs
    assert num_dropped == 0


def test_a_replay_buffer_holds_every_step() -> None:
    config = DQNConfig().environment(EndsSoon).debugging(seed=5)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=16, rollout_fragment_length=1)
    config.training(num_steps_sampled_before_learning_starts=10_000, n_step=3)
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=800)
    with config.build() as algo:
        account = algo.train()["accounting"]
        (num_stored,) = algo.learner_group.foreach_learner(
            lambda learner: learner.source.buffer.get_num_timesteps()
        )
    assert num_stored == account["sampled"]


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_on_policy_batches_waste_at_most_one_percent(num_env_runners: int) -> None:
    config = PPOConfig().environment(EndsSoon)
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=64 // max(1, num_env_runners))
    config.training(train_batch_size_per_learner=64 * 8, minibatch_size=128, num_epochs=1)
    num_sampled, num_dropped = dropped(config, 4)
    assert num_sampled >= 4 * 64 * 8
    assert num_dropped <= 0.01 * num_sampled
