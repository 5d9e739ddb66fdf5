"""Replay buffers by class: one's own in a run, and hindsight goals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import (
    DQN,
    Algorithm,
    ConfigurationError,
    DQNConfig,
    HindsightEpisodeReplayBuffer,
    ReplayBuffer,
    SingleAgentEpisode,
)
from tests.support.runs import small


class Transitions(ReplayBuffer):
    """The newest transitions in a list, with the least that a buffer has."""

    def __init__(self, capacity: int, noted: int = 0) -> None:
        self.capacity, self.noted = capacity, noted
        self.items: list[SingleAgentEpisode] = []

    def __len__(self) -> int:
        return len(self.items)

    def add(self, episodes: Any) -> None:
        for episode in episodes:
            self.items += [episode[t : t + 1] for t in range(len(episode))]
        del self.items[: -self.capacity]

    def sample(self, num_items: int | None = None, *, rng: Any = None, **options: Any) -> Any:
        return [self.items[i] for i in rng.integers(len(self.items), size=num_items)]

    def get_state(self) -> dict[str, Any]:
        return {"noted": self.noted}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.noted = state["noted"] + 1


def config(**replay_buffer_config: Any) -> Any:
    sizes = {"min_sample_timesteps_per_iteration": 60, "min_time_s_per_iteration": 0, "train_batch_size": 8}
    return small(
        DQNConfig,
        num_envs_per_env_runner=1,
        num_steps_sampled_before_learning_starts=20,
        replay_buffer_config=replay_buffer_config,
        **sizes,
    )


def the_buffer(algo: Algorithm) -> Any:
    return algo.learner_group.foreach_learner(lambda learner: learner)[0].source.buffer


def test_a_run_trains_from_a_buffer_of_ones_own_and_accounts_for_its_steps(tmp_path: Any) -> None:
    made = config(type=Transitions, capacity=30, noted=7).checkpointing(checkpoint_replay=True)
    with made.build() as algo:
        result = algo.train()
        buffer = the_buffer(algo)
        assert isinstance(buffer, Transitions)
        assert (buffer.capacity, buffer.noted, len(buffer)) == (30, 7, 30)
        assert result["learners"]["default_policy"]["qf_loss"] > 0
        assert result["accounting"]["dropped"] == {}
        path = algo.save(str(tmp_path / "saved"))
    with DQN.from_checkpoint(path) as other:
        assert the_buffer(other).noted == 8


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": dict}, "expected a ReplayBuffer of one agent .*or your own subclass"),
        ({"type": Transitions, "capacity": 100, "notd": 1}, "'notd'.*no such key.*noted"),
        ({"type": "PrioritisedEpisodeReplayBuffer"}, "PrioritizedEpisodeReplayBuffer"),
        ({"type": "HindsightEpisodeReplayBuffer"}, "CartPoleEnv has no method compute_reward"),
    ],
)
def test_what_is_no_such_buffer_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        config(**given).build()


class FlipBits(gym.Env[Any, Any]):
    """Flip one of n bits per step until they equal the goal, in n steps: -1 per step, 0 at the goal."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        n = self.n = int(config["n"])
        bits = gym.spaces.Box(0.0, 1.0, (n,), np.float32)
        names = "observation", "achieved_goal", "desired_goal"
        self.observation_space = gym.spaces.Dict(dict.fromkeys(names, bits))
        self.action_space = gym.spaces.Discrete(n)

    def _observed(self) -> dict[str, Any]:
        return {
            "observation": self.bits.copy(),
            "achieved_goal": self.bits.copy(),
            "desired_goal": self.goal.copy(),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(2, size=(2, self.n)).astype(np.float32)
        self.t = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.bits[action] = 1 - self.bits[action]
        self.t += 1
        reward = float(self.compute_reward(self.bits[None], self.goal[None], [{}])[0])
        done = self.compute_terminated(self.bits, self.goal, {})
        return self._observed(), reward, done, self.t >= self.n, {}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        assert len(achieved_goal) == len(info)
        return (achieved_goal == desired_goal).all(-1).astype(np.float32) - 1.0

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool((achieved_goal == desired_goal).all())


def test_other_goals_are_what_the_episode_achieves_later_and_their_rewards_are_the_envs() -> None:
    env = FlipBits({"n": 6})
    buffer = HindsightEpisodeReplayBuffer(
        1000, compute_reward=env.compute_reward, compute_terminated=env.compute_terminated, seed=3
    )
    episodes = []
    for number in range(20):
        observations, actions, rewards, done = [env.reset(seed=number)[0]], [], [], False
        while not done and len(actions) < 6:
            actions.append((number + 5 * len(actions)) % 6)
            obs, reward, done, _, _ = env.step(actions[-1])
            observations.append(obs)
            rewards.append(reward)
        for obs in observations:
            obs["observation"][:] = number / 20  # tells the episodes apart
        episodes.append(
            SingleAgentEpisode(
                observations=observations,
                actions=actions,
                rewards=rewards,
                terminated=done,
                truncated=not done,
                observation_space=env.observation_space,
                action_space=env.action_space,
                len_lookback_buffer=0,
            )
        )
    buffer.add(episodes)
    episodes = [episode.to_numpy() for episode in episodes]
    num_changed = 0
    for one in buffer.sample(2000):
        drawn, t = one.get_observations(), one.t_started
        recorded = episodes[round(20 * drawn["observation"][0, 0])].get_observations()
        goal = drawn["desired_goal"][0]
        assert (drawn["desired_goal"] == goal).all()
        assert (drawn["achieved_goal"] == recorded["achieved_goal"][t : t + 2]).all()
        if not (goal == recorded["desired_goal"][t]).all():
            num_changed += 1
            assert (goal == recorded["achieved_goal"][t + 1 :]).all(1).any()
        reached = (drawn["achieved_goal"][1] == goal).all()
        assert one.get_rewards(0) == reached - 1.0
        assert one.is_terminated == reached
    assert 0.7 < num_changed / 2000 < 0.85  # four of five, but for those whose own goal was reached


def test_a_run_trains_with_hindsight() -> None:
    kind = {"type": "HindsightEpisodeReplayBuffer", "capacity": 100}
    with config(**kind).environment(FlipBits, env_config={"n": 4}).build() as algo:
        assert algo.train()["learners"]["default_policy"]["qf_loss"] > 0
        batch = the_buffer(algo).sample(200)
    assert {reward for one in batch for reward in one.get_rewards()} == {-1.0, 0.0}
