"""TQC's loss against numbers computed by hand, and what differs from SAC."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import ConfigurationError, TQCConfig
from rlzmq.algorithms.tqc.tqc_learner import quantile_critic_loss, quantile_targets
from tests.support.losses import loss_of, one_layer, set_layer, transitions

BOX = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


def test_targets_leave_out_the_largest_quantiles_of_all_critics_together() -> None:
    targets = quantile_targets(
        next_q_BCQ=torch.tensor([[[1.0, 9.0, 2.0], [8.0, 3.0, 4.0]]] * 2),
        num_dropped=2,
        next_logp_B=torch.tensor([-2.0, -2.0]),
        rewards_B=torch.tensor([10.0, 10.0]),
        discounts_B=torch.tensor([0.5, 0.0]),
        alpha=torch.tensor(0.5),
    )
    assert targets.tolist() == [[10.0 + 0.5 * (z + 1.0) for z in (1.0, 2.0, 3.0, 4.0)], [10.0] * 4]


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_the_quantile_loss(kind: Any) -> None:
    losses, td_errors = quantile_critic_loss(
        q_BCQ=torch.tensor([[[0.0, 2.0], [1.0, 1.0]]]),
        targets_BK=torch.tensor([[0.5, 3.0]]),
        weights_B=torch.tensor([0.5]),
        kind=kind,
    )

    def pair(tau: float, q: float, y: float) -> float:
        error = y - q
        huber = 0.5 * error**2 if abs(error) <= 1.0 else abs(error) - 0.5
        return abs(tau - (error < 0.0)) * (error**2 if kind == "mse" else huber)

    first = sum(pair(tau, q, y) for tau, q in ((0.25, 0.0), (0.75, 2.0)) for y in (0.5, 3.0)) / 4
    second = sum(pair(tau, 1.0, y) for tau in (0.25, 0.75) for y in (0.5, 3.0)) / 4
    assert losses.tolist() == pytest.approx([0.5 * first, 0.5 * second])
    assert td_errors.tolist() == [0.75]


def test_a_learners_update_uses_all_quantiles() -> None:
    numbers = {"n_quantiles": 3, "n_critics": 4, "top_quantiles_to_drop_per_net": 1}
    learner = one_layer(TQCConfig, BOX, **numbers, initial_alpha=1e-9, gamma=0.5).build_learner()
    module = learner.module["default_policy"]
    assert len(module.qfs) == len(module.target_qfs) == 4
    for critic, target in zip(module.qfs, module.target_qfs, strict=True):
        set_layer(critic, 0.0, [1.0, 2.0, 6.0])
        set_layer(target, 0.0, [0.0, 4.0, 100.0])
    batch = transitions()
    outputs = module.forward_train(batch)
    assert outputs["qf_preds"].shape == (1, 4, 3)
    assert float(outputs["q_curr"].detach()) == pytest.approx(3.0)
    loss_of(learner, batch, outputs)
    # Four of twelve quantiles, those of 100, are left out; the others are 0 and 4.
    assert learner.report.mean("td_error_mean", 1)["default_policy"] == pytest.approx(3.0 - (1.0 + 0.5 * 2.0))


def test_what_tqc_cannot_use() -> None:
    with pytest.raises(ConfigurationError, match="Set at most 4"):
        one_layer(TQCConfig, BOX, n_quantiles=5, top_quantiles_to_drop_per_net=5).validate()
