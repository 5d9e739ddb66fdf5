"""IMPALA's and APPO's losses against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlzmq.algorithms.appo.appo_loss import appo_policy_terms
from rlzmq.algorithms.impala.impala_loss import impala_loss_terms
from rlzmq.learners.actor_critic import adapted_kl_coeff


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
