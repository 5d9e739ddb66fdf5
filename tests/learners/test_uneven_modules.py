"""Learners whose modules have uneven data: RLlib deadlocks or crashes there (ray#63819, ray#66030)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import MultiAgentEnv, PPOConfig


class Rarely(MultiAgentEnv):
    """Agent "a" acts in each step, agent "b" in every 17th only; episodes end after 23 to 40 steps."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.possible_agents = self.agents = ["a", "b"]
        space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_spaces = dict.fromkeys("ab", space)
        self.action_spaces = dict.fromkeys("ab", gym.spaces.Discrete(2))
        self._num_episodes = 0

    def _observations(self) -> dict[str, Any]:
        seen = ["a", "b"] if self._t % 17 == 16 else ["a"]
        return {agent: self.observation_spaces[agent].sample() for agent in seen}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t = 0
        self._num_episodes += 1
        self._length = 23 + self._num_episodes % 18
        return self._observations(), {}

    def step(self, action_dict: dict[str, Any]) -> Any:
        self._t += 1
        is_over = self._t >= self._length
        observations = self._observations()
        if is_over:
            observations = {agent: self.observation_spaces[agent].sample() for agent in "ab"}
        rewards = dict.fromkeys(observations, 1.0)
        return observations, rewards, {"__all__": is_over}, {"__all__": False}, {}


@pytest.mark.slow
def test_four_learners_of_two_recurrent_modules_train_on_uneven_data(tmp_path: Path) -> None:
    config = (
        PPOConfig()
        .environment(Rarely)
        .env_runners(num_env_runners=1)
        .learners(num_learners=4)
        .multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode: agent_id)
        .rl_module(
            model_config={"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 5, "fcnet_hiddens": [8]}
        )
        .training(train_batch_size_per_learner=50, minibatch_size=16, num_epochs=2)
        .debugging(seed=3)
    )
    with config.build() as algo:
        before = algo.get_weights()
        for _ in range(4):
            result = algo.train()
        after = algo.get_weights()
    assert result["accounting"]["trained"] >= 4 * 200
    for module_id in ("a", "b"):
        assert any((after[module_id][name] != before[module_id][name]).any() for name in before[module_id])
        assert np.isfinite(result["learners"][module_id]["policy_loss"])
    steps = {mid: result["learners"][mid]["num_module_steps_trained"] for mid in "ab"}
    assert 0 < 8 * steps["b"] < steps["a"]
