"""PPO's advantages and value targets as RLlib standardizes them: the numbers of RLlib 2.60 on the same episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import Columns, PPOConfig, SingleAgentEpisode

# What RLlib 2.60's PPO learner connector gave, with compute_values(batch) = batch["obs"].sum(-1), γ = 0.95, λ = 0.9.
ADVANTAGES = [
    -1.0454, -1.4236, 0.8414, 1.7268, -0.1145, -0.1095, -1.4111, -1.4005, 0.9570, 0.7406, 1.6738, -0.1224, -1.6734,
    1.1798, -0.3988, 0.6205,
]  # fmt: skip
VALUE_TARGETS = [
    -2.1836, -1.7067, -1.1773, -1.1321, -0.2092, 0.1602, 0.1503, 1.1750, 2.0969, 1.3374, 1.6831, -0.4181, -1.0738,
    0.0284, 1.3602, 0.9897,
]  # fmt: skip


def episodes() -> list[SingleAgentEpisode]:
    rng = np.random.default_rng(0)
    made = []
    for length, terminated in ((5, True), (1, False), (7, False), (3, True)):
        episode = SingleAgentEpisode(
            observations=list(rng.normal(size=(length + 1, 4)).astype(np.float32)),
            actions=list(rng.integers(0, 2, length)),
            rewards=list(rng.normal(size=length)),
            terminated=terminated,
            truncated=not terminated and length == 1,
            len_lookback_buffer=0,
            observation_space=gym.spaces.Box(-9, 9, (4,)),
            action_space=gym.spaces.Discrete(2),
            extra_model_outputs={
                Columns.ACTION_LOGP: list(np.zeros(length, np.float32)),
                Columns.ACTION_DIST_INPUTS: list(np.zeros((length, 2), np.float32)),
            },
        )
        made.append(episode.to_numpy())
    return made


@pytest.mark.parametrize("standardize_advantages", ["as_rllib", "real_steps"])
def test_advantages_are_rllibs_number_for_number_on_request(standardize_advantages: str) -> None:
    config = PPOConfig().environment("CartPole-v1").training(lambda_=0.9, gamma=0.95)
    config.training(standardize_advantages=standardize_advantages)
    learner = config.build_learner(env=gym.make("CartPole-v1"))
    module = learner.module["default_policy"]
    module.compute_values = lambda batch, embeddings=None: batch[Columns.OBS].sum(-1)
    batch = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=episodes(), explore=False, shared_data={}
    )["default_policy"]
    is_real = batch[Columns.LOSS_MASK].numpy().astype(bool)
    advantages = batch[Columns.ADVANTAGES].numpy()[is_real]
    np.testing.assert_allclose(batch[Columns.VALUE_TARGETS].numpy()[is_real], VALUE_TARGETS, atol=6e-5)
    if standardize_advantages == "as_rllib":
        np.testing.assert_allclose(advantages, ADVANTAGES, atol=6e-5)
    else:
        assert abs(advantages.mean()) < 1e-6
        assert advantages.std() == pytest.approx(1.0, abs=1e-5)
        assert np.corrcoef(advantages, ADVANTAGES)[0, 1] > 0.999  # the same but for shift and scale
