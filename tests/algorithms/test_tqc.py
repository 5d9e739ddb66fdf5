"""TQC's loss against numbers computed by hand, and what differs from SAC."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import Columns, ConfigurationError, TQCConfig
from rlzmq.algorithms.tqc.tqc_learner import quantile_critic_loss, quantile_targets

STATES = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def config(action_space: Any = None, **training: Any) -> TQCConfig:
    made: Any = (
        TQCConfig()
        .environment(
            observation_space=STATES, action_space=action_space or gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        )
        .training(num_steps_sampled_before_learning_starts=0, **training)
        .rl_module(model_config={"fcnet_hiddens": []})
        .debugging(seed=0)
    )
    return made  # type: ignore[no-any-return]


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
    learner: Any = config(
        n_quantiles=3, n_critics=4, top_quantiles_to_drop_per_net=1, initial_alpha=1e-9, gamma=0.5
    ).build_learner()
    module = learner.module["default_policy"]
    assert len(module.qfs) == len(module.target_qfs) == 4
    with torch.no_grad():
        for critic, target in zip(module.qfs, module.target_qfs, strict=True):
            for head, bias in ((critic.head, [1.0, 2.0, 6.0]), (target.head, [0.0, 4.0, 100.0])):
                head.layers[0].weight.zero_()
                head.layers[0].bias.copy_(torch.tensor(bias))
    batch = {
        Columns.OBS: torch.zeros(1, 2),
        Columns.NEXT_OBS: torch.zeros(1, 2),
        Columns.ACTIONS: torch.zeros(1, 1),
        Columns.REWARDS: torch.tensor([1.0]),
        Columns.TERMINATEDS: torch.tensor([False]),
        "n_step": torch.tensor([1]),
        "weights": torch.tensor([1.0]),
    }
    outputs = module.forward_train(batch)
    assert outputs["qf_preds"].shape == (1, 4, 3)
    assert float(outputs["q_curr"].detach()) == pytest.approx(3.0)
    learner.compute_loss_for_module(
        module_id="default_policy", config=learner.config, batch=batch, fwd_out=outputs
    )
    # Four of twelve quantiles, those of 100, are left out; the others are 0 and 4.
    assert learner.report.mean("td_error_mean", 1)["default_policy"] == pytest.approx(3.0 - (1.0 + 0.5 * 2.0))


def test_what_tqc_cannot_use() -> None:
    with pytest.raises(ConfigurationError, match="Set at most 4"):
        config(n_quantiles=5, top_quantiles_to_drop_per_net=5).validate()
