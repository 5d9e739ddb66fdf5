"""IMPALA's and APPO's losses against numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import APPOConfig, IMPALAConfig
from rlzmq.algorithms.appo.appo_learner import appo_policy_terms
from rlzmq.algorithms.impala.impala_learner import impala_loss_terms
from rlzmq.algorithms.ppo.ppo_learner import adapted_kl_coeff
from rlzmq.episodes.episode_batch import EpisodeBatch


def test_impala_terms() -> None:
    terms = impala_loss_terms(
        logp_B=torch.tensor([-1.0, -2.0, -9.0]),
        advantages_B=torch.tensor([3.0, -1.0, 9.0]),
        values_B=torch.tensor([1.0, 2.0, 9.0]),
        value_targets_B=torch.tensor([3.0, 1.0, 0.0]),
        entropy_B=torch.tensor([0.5, 0.25, 9.0]),
        mask_B=torch.tensor([True, True, False]),
    )
    assert float(terms.policy_loss) == pytest.approx(-(-1.0 * 3.0 + -2.0 * -1.0))  # 1
    assert float(terms.value_loss) == pytest.approx(0.5 * (4.0 + 1.0))
    assert float(terms.entropy) == pytest.approx(0.75)
    assert int(terms.num_rows) == 2


def test_appo_clips_against_the_target_policy() -> None:
    # rows: π/π̄ = 2 with A > 0 is clipped to 1.4; 0.5 with A < 0 to 0.6; 1 is left; masked
    probabilities = {"logp": [0.8, 0.2, 0.5, 0.1], "target": [0.4, 0.4, 0.5, 0.9]}
    logs = {name: torch.tensor([math.log(p) for p in values]) for name, values in probabilities.items()}
    terms = appo_policy_terms(
        logp_B=logs["logp"],
        target_logp_B=logs["target"],
        behavior_logp_B=logs["target"],
        advantages_B=torch.tensor([1.0, -1.0, 2.0, 100.0]),
        clip_param=0.4,
        mask_B=torch.tensor([True, True, True, False]),
    )
    assert float(terms.policy_loss) == pytest.approx(-(1.4 - 0.6 + 2.0) / 3)
    assert float(terms.mean_is) == pytest.approx(1.0)
    assert float(terms.var_is) == pytest.approx(0.0)


def test_appo_bounds_the_ratio_of_sampling_and_target_policy() -> None:
    # μ/π̄ = 4 counts as 2, so the ratio is 2 · π/μ = 2 · 0.25 = 0.5
    terms = appo_policy_terms(
        logp_B=torch.log(torch.tensor([0.2])),
        target_logp_B=torch.log(torch.tensor([0.2])),
        behavior_logp_B=torch.log(torch.tensor([0.8])),
        advantages_B=torch.tensor([1.0]),
        clip_param=0.4,
    )
    assert float(terms.policy_loss) == pytest.approx(-0.5)
    assert float(terms.mean_is) == pytest.approx(2.0)


def test_the_kl_coefficient_adapts_around_its_target() -> None:
    assert adapted_kl_coeff(1.0, 0.03, 0.01) == 1.5
    assert adapted_kl_coeff(1.0, 0.004, 0.01) == 0.5
    assert adapted_kl_coeff(1.0, 0.012, 0.01) == 1.0
    assert adapted_kl_coeff(1.0, float("inf"), 0.01) == 1.0
    assert adapted_kl_coeff(1.0, float("nan"), 0.01) == 1.0


OBSERVATION_SPACE, ACTION_SPACE = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)


def episodes() -> EpisodeBatch:
    rng = np.random.default_rng(0)
    return EpisodeBatch(
        {
            "obs": rng.normal(size=(33, 4)).astype(np.float32),
            "actions": rng.integers(0, 2, 33),
            "rewards": rng.normal(size=33),
            "action_logp": np.full(33, math.log(0.5), np.float32),
            "action_dist_inputs": np.zeros((33, 2), np.float32),
        },
        start=np.array([0, 11, 22]),
        length=np.array([10, 10, 10]),
        terminated=np.array([True, False, True]),
        observation_space=OBSERVATION_SPACE,
        action_space=ACTION_SPACE,
    )


@pytest.mark.parametrize("config_class", [IMPALAConfig, APPOConfig])
def test_a_prepared_batch_trains_as_its_episodes_do(config_class: Any) -> None:
    weights = []
    for is_prepared in (False, True):
        config = config_class().environment(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
        config.debugging(seed=0).training(train_batch_size_per_learner=30)
        if config_class is APPOConfig:
            config.training(use_circular_buffer=False)
        learner = config.build_learner()
        learner.update(**{"batch": learner.prepare(episodes())} if is_prepared else {"episodes": episodes()})
        parameters = learner.module["default_policy"].parameters()
        weights.append(np.concatenate([parameter.detach().numpy().ravel() for parameter in parameters]))
    # tanh differs in the last bits without a graph, and Adam makes small gradients large
    np.testing.assert_allclose(*weights, atol=1e-5)
