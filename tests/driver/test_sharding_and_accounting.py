"""Equal shards, and the account of env steps: what is sampled is trained, also where episodes end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlzmq import DQNConfig, EpisodeBatch, SingleAgentEpisode
from rlzmq.driver.async_learner_group import shard_episodes
from rlzmq.driver.updates import Accounting
from tests.support.runs import ShortEnv, small, two_agents


def episode(length: int, first: float = 0.0) -> SingleAgentEpisode:
    return SingleAgentEpisode(
        observations=[np.float32([first + i]) for i in range(length + 1)],
        actions=[0] * length,
        rewards=[first + i for i in range(length)],
        terminated=True,
        len_lookback_buffer=0,
    )


@pytest.mark.parametrize(("lengths", "ranks"), [([10], 3), ([1, 1, 1], 3), ([5, 7, 2], 2), ([100], 1)])
def test_every_rank_gets_equally_many_steps_and_no_step_twice(lengths: list[int], ranks: int) -> None:
    episodes = [episode(length, 1000.0 * i) for i, length in enumerate(lengths)]
    for given in (episodes, EpisodeBatch.from_episodes([e.to_numpy() for e in episodes])):
        shards, num_steps = shard_episodes(given, ranks)
        sizes = [sum(len(e) for e in shard) for shard in shards]
        assert sizes == [sum(lengths) // ranks] * ranks
        assert num_steps == sum(sizes)
        rewards = np.concatenate([np.asarray(e.get_rewards()) for shard in shards for e in shard])
        expected = np.concatenate([np.asarray(e.get_rewards()) for e in episodes])[:num_steps]
        np.testing.assert_array_equal(rewards, expected)


def test_a_cut_episode_is_done_in_its_last_part_only() -> None:
    shards, _ = shard_episodes([episode(10)], 2)
    assert [e.is_done for shard in shards for e in shard] == [False, True]
    assert [e.t_started for shard in shards for e in shard] == [0, 5]


def test_too_few_steps_for_the_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 env steps cannot be shared by 3"):
        shard_episodes([episode(2)], 3)


def test_the_account_always_adds_up() -> None:
    account = Accounting()
    account.add(sampled=100)
    account.add(trained=60, dropped={"surplus": 3})
    assert account.to_dict() == {"sampled": 100, "trained": 60, "dropped": {"surplus": 3}, "pending": 37}
    assert str(account) == "sampled 100 = trained 60 + dropped 3 (surplus 3) + pending 37"
    account.drop_pending("stopped")
    assert account.pending == 0
    with pytest.raises(AssertionError, match="more env steps"):
        account.add(trained=1)


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


def test_learners_share_the_envs_of_a_runner_of_several_agents() -> None:
    config = two_agents(config_class=DQNConfig, num_env_runners=1, num_envs_per_env_runner=4, num_learners=2)
    config.training(num_steps_sampled_before_learning_starts=10_000, n_step=3)
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=400)

    def stored(learner: Any) -> tuple[int, int]:
        buffer = learner.source.buffer
        return buffer.get_num_timesteps(), buffer.get_num_episodes()

    with config.build() as algo:
        result = algo.train()
        steps, episodes = zip(*algo.learner_group.foreach_learner(stored), strict=True)
    assert sum(steps) == result["accounting"]["sampled"] >= 400
    assert min(steps) > 150  # autoreset steps are none
    # Each is in one buffer. There are at most as many unfinished ones as envs.
    assert 0 <= sum(episodes) - result["env_runners"]["num_episodes_lifetime"] <= 4


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_on_policy_batches_waste_at_most_one_percent(num_env_runners: int) -> None:
    sizes = {"num_env_runners": num_env_runners, "num_envs_per_env_runner": 64 // max(1, num_env_runners)}
    with small(env=EndsSoon, train_batch_size_per_learner=64 * 8, **sizes).build() as algo:
        for _ in range(4):
            account = algo.train()["accounting"]
    assert account["sampled"] >= 4 * 64 * 8
    assert sum(account["dropped"].values()) <= 0.01 * account["sampled"]
    assert account["pending"] == 0 or num_env_runners
