"""What is sampled is trained: no env step is lost where episodes end, before replay buffers or on-policy."""

from __future__ import annotations

from typing import Any

import pytest

from rlzmq import DQNConfig
from tests.support.runs import ShortEnv, small


class EndsSoon(ShortEnv):
    """Episodes of 1 to 39 steps, 20 in the mean."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        begun = super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 40))  # type: ignore[misc]
        return begun


@pytest.mark.parametrize(("num_envs", "n_step"), [(4, 1), (32, 3)])
def test_a_replay_buffer_holds_every_step(num_envs: int, n_step: int) -> None:
    config = small(DQNConfig, EndsSoon, num_envs_per_env_runner=num_envs, rollout_fragment_length=1)
    config.training(num_steps_sampled_before_learning_starts=10_000, n_step=n_step)
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=40 * num_envs)
    with config.build() as algo:
        account = algo.train()["accounting"]
        (num_stored,) = algo.learner_group.foreach_learner(
            lambda learner: learner.source.buffer.get_num_timesteps()
        )
    assert num_stored == account["sampled"] >= 40 * num_envs
    assert not account["dropped"]


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_on_policy_batches_waste_at_most_one_percent(num_env_runners: int) -> None:
    sizes = {"num_env_runners": num_env_runners, "num_envs_per_env_runner": 64 // max(1, num_env_runners)}
    with small(env=EndsSoon, train_batch_size_per_learner=64 * 8, **sizes).build() as algo:
        for _ in range(4):
            account = algo.train()["accounting"]
    assert account["sampled"] >= 4 * 64 * 8
    assert sum(account["dropped"].values()) <= 0.01 * account["sampled"]
    assert account["pending"] == 0 or num_env_runners
