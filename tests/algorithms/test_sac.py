"""SAC's and TQC's losses against numbers computed by hand, gradients, a task that is learned, and refused settings."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import Columns, ConfigurationError, SACConfig, TQCConfig
from rlzmq.algorithms.sac.sac_learner import critic_loss, loss_stats
from rlzmq.algorithms.tqc.tqc_learner import quantile_critic_loss, quantile_targets
from tests.support.losses import STATES, loss_of, one_layer, set_layer, transitions
from tests.support.runs import ShortEnv, small

BOX = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)


def config(action_space: Any = BOX, **training: Any) -> Any:
    return one_layer(SACConfig, action_space, gamma=0.5, **training)


def batch_of(actions: Any, *, is_over: bool = False) -> dict[str, torch.Tensor]:
    return transitions(actions=actions, rewards=[3.0], terminateds=[is_over], n_step=[2], weights=[0.5])


def test_each_critics_rows_are_weighted_and_squared_errors_count_in_full() -> None:
    losses, td_errors = critic_loss(
        q_BC=torch.tensor([[1.0, 3.0], [0.0, 0.5]]),
        targets_B=torch.tensor([1.0, 0.0]),
        weights_B=torch.tensor([0.5, 1.0]),
        kind="huber",
    )
    first, second = (0.5 * 0.0 + 1.0 * 0.0) / 2, (0.5 * (2.0 - 0.5) + 1.0 * 0.5 * 0.25) / 2
    assert losses.tolist() == pytest.approx([first, second])
    assert td_errors.tolist() == [1.0, 0.25]
    assert {name: float(loss) for name, loss in loss_stats(losses).items()} == {
        "qf_loss": pytest.approx(first),
        "qf_twin_loss": pytest.approx(second),
    }
    for single in (losses[:1], torch.tensor([1.0, 2.0, 3.0])):
        assert loss_stats(single) == {"qf_loss": single.sum()}
    losses, td_errors = critic_loss(
        q_BC=torch.tensor([[1.0, 2.0], [0.0, 5.0]]),
        targets_B=torch.tensor([3.0, 1.0]),
        weights_B=torch.ones(2),
        kind=SACConfig().td_error_loss_fn,
    )
    assert losses.tolist() == [(4.0 + 1.0) / 2, (1.0 + 16.0) / 2]
    assert td_errors.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("is_over", [False, True])
def test_the_learner_uses_the_lower_target_critic_and_its_own_temperature(is_over: bool) -> None:
    learner: Any = config(initial_alpha=2.0, train_batch_size=1).build_learner()
    module = learner.module["default_policy"]
    for critic, online, target in zip(range(2), (1.0, 4.0), (7.0, 5.0), strict=True):
        set_layer(module.qfs[critic], 0.0, online)
        set_layer(module.target_qfs[critic], 0.0, target)
    batch = batch_of([[0.5, -0.5]], is_over=is_over)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        loss = loss_of(learner, batch)
        torch.manual_seed(5)
        logp = float(module.forward_train(batch)["logp_resampled"].detach())
        next_logp = float(
            module.forward_target({Columns.OBS: batch[Columns.NEXT_OBS]})["logp_next_resampled"]
        )
    target = 3.0 + (0.0 if is_over else 0.25 * (5.0 - 2.0 * next_logp))
    critics = sum(0.5 * (target - q) ** 2 for q in (1, 4))
    actor, temperature = 2.0 * logp - 1.0, -math.log(2.0) * (logp - 2.0)
    assert float(loss.detach()) == pytest.approx(critics + actor + temperature, rel=1e-5)
    # An entropy above its target, the negative number of actions: a step down the gradient lowers α.
    loss.backward()
    assert float(module.log_alpha.grad) == pytest.approx(-(logp - 2.0), rel=1e-5)


def test_each_loss_reaches_its_own_parameters_only() -> None:
    module: Any = config().build_learner().module["default_policy"]
    outputs = module.forward_train(batch_of([[0.5, -0.5]]))
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert names

    def reached(output: torch.Tensor) -> set[str]:
        parameters = [module.get_parameter(name) for name in names]
        gradients = torch.autograd.grad(output.sum(), parameters, allow_unused=True, retain_graph=True)
        return {name for name, g in zip(names, gradients, strict=True) if g is not None}

    critics = {name for name in names if name.startswith("qfs.")}
    policy = {name for name in names if name.startswith("pi.")}
    assert critics | policy | {"log_alpha"} == set(names)
    assert reached(outputs["qf_preds"]) == critics
    assert reached(outputs["q_curr"]) == reached(outputs["logp_resampled"]) == policy


def test_discrete_actions_use_the_policys_expectations() -> None:
    learner: Any = config(gym.spaces.Discrete(2, start=3), twin_q=True, train_batch_size=1).build_learner()
    module = learner.module["default_policy"]
    pi = [0.25, 0.75]
    set_layer(module.pi, 0.0, [math.log(p) for p in pi])
    for critic, online, target in ((0, [1.0, 5.0], [1.0, 3.0]), (1, [2.0, 4.0], [2.0, 1.0])):
        set_layer(module.qfs[critic], 0.0, online)
        set_layer(module.target_qfs[critic], 0.0, target)
    outputs = module.forward_train(batch_of([4]))
    minus_entropy = sum(p * math.log(p) for p in pi)
    assert outputs["qf_preds"].tolist() == [[5.0, 4.0]]
    assert float(outputs["q_curr"].detach()) == pytest.approx(0.25 * 1.0 + 0.75 * 4.0)
    assert float(outputs["logp_resampled"].detach()) == pytest.approx(minus_entropy)
    assert float(module.forward_target(batch_of([4]))["q_target_next"]) == pytest.approx(1.0)
    loss_of(learner, batch_of([4]), outputs)
    assert learner.report.mean("target_entropy", 1)["default_policy"] == pytest.approx(0.98 * math.log(2.0))


def test_learning_rates_are_separate_and_the_temperature_is_state() -> None:
    made = config(actor_lr=1e-3, critic_lr=[(0, 2e-3), (100, 0.0)], alpha_lr=3e-3, initial_alpha=0.7)
    learner: Any = made.build_learner()
    rates = {name: o.param_groups[0]["lr"] for name, o in learner.get_optimizers_for_module("default_policy")}
    assert {name: float(rate) for name, rate in rates.items()} == pytest.approx(
        {"qf": 2e-3, "policy": 1e-3, "alpha": 3e-3}
    )
    with torch.no_grad():
        learner.module["default_policy"].log_alpha.fill_(-3.0)
    other: Any = made.build_learner()
    assert float(other.module["default_policy"].log_alpha.detach()) == pytest.approx(math.log(0.7))
    other.set_state(learner.get_state())
    assert float(other.module["default_policy"].log_alpha.detach()) == -3.0


class Reach(ShortEnv):
    """One step: the reward is 0 at the action 1 of -2 … 2, and falls with the distance."""

    observation_space, action_space, length = STATES, gym.spaces.Box(-2.0, 2.0, (1,), np.float32), 1

    def reward(self, action: Any) -> float:
        return -10.0 * abs(float(action[0]) - 1.0)


def test_sac_learns_where_to_reach_in_300_steps() -> None:
    rates = {"actor_lr": 3e-3, "critic_lr": 1e-2, "alpha_lr": 1e-2, "initial_alpha": 0.1}
    made = small(
        SACConfig,
        Reach,
        num_envs_per_env_runner=1,
        rollout_fragment_length=4,
        train_batch_size=32,
        training_intensity=24.0,
        num_steps_sampled_before_learning_starts=64,
        td_error_loss_fn="huber",
        model_config={"fcnet_hiddens": [32], "fcnet_activation": "relu"},
        min_sample_timesteps_per_iteration=300,
        min_time_s_per_iteration=0,
        **rates,
    )
    with made.build() as algo:
        algo.train()
        module: Any = algo.get_module()
        logits = module.forward_inference({Columns.OBS: torch.zeros(1, 2)})[Columns.ACTION_DIST_INPUTS]
    # The module acts in (-1, 1), so 1 of -2 … 2 is 0.5.
    assert math.tanh(float(logits[0, 0])) == pytest.approx(0.5, abs=0.15)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Set actor_lr, critic_lr and alpha_lr"):
        config(lr=1e-4).validate()
    with pytest.raises(ConfigurationError, match="use_lstm"):
        config().rl_module(model_config={"use_lstm": True}).build_learner()
    with pytest.raises(ConfigurationError, match="initial_alpha"):
        config(initial_alpha=0.0)
    with pytest.raises(ConfigurationError, match="actor_lr"):
        config(actor_lr=[(5, 1.0), (6, 0.0)]).validate()


ONE_ACTION = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


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
    q_BCQ = torch.tensor([[[0.0, 2.0], [1.0, 1.0]]], requires_grad=True)
    losses, td_errors = quantile_critic_loss(
        q_BCQ=q_BCQ, targets_BK=torch.tensor([[0.5, 3.0]]), weights_B=torch.tensor([0.5]), kind=kind
    )
    errors = torch.tensor([0.5, 3.0]) - q_BCQ[..., None]
    huber = torch.where(errors.abs() <= 1.0, 0.5 * errors**2, errors.abs() - 0.5)
    slopes = (torch.tensor([[0.25], [0.75]]) - (errors < 0.0).float()).abs()
    expected = 0.5 * (slopes * (errors**2 if kind == "mse" else huber)).mean((0, 2, 3))
    assert losses.tolist() == pytest.approx(expected.tolist())
    ours, autograds = (torch.autograd.grad(loss.sum(), q_BCQ)[0] for loss in (losses, expected))
    assert torch.allclose(ours, autograds)
    assert td_errors.tolist() == [0.75]


def test_tqcs_update_uses_all_quantiles() -> None:
    assert TQCConfig().td_error_loss_fn == "mse", "critics learn the mean of returns, not their median"
    numbers = {"n_quantiles": 3, "n_critics": 4, "top_quantiles_to_drop_per_net": 1}
    learner = one_layer(TQCConfig, ONE_ACTION, **numbers, initial_alpha=1e-9, gamma=0.5).build_learner()
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
        one_layer(TQCConfig, ONE_ACTION, n_quantiles=5, top_quantiles_to_drop_per_net=5).validate()
