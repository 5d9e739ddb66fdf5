"""PPO: the loss against the paper's formula, its coefficients over updates; IMPALA's and APPO's losses by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from rlzmq import APPOConfig, IMPALAConfig, PPOConfig
from rlzmq.algorithms.appo.appo_learner import appo_policy_terms
from rlzmq.algorithms.impala.impala_learner import impala_loss_terms
from rlzmq.algorithms.ppo import ppo_learner as ppo_learner_module
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner, PPOLossSettings, adapted_kl_coeff, ppo_loss
from rlzmq.episodes.columns import Columns
from tests.learners.cases import (
    ACTION_SPACE,
    OBSERVATION_SPACE,
    episode_batch,
    ppo_config,
    ppo_learner,
)


def ppo_batch(num_rows: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(num_rows, 2, generator=generator)
    actions = torch.randint(2, (num_rows,), generator=generator)
    return {
        Columns.OBS: torch.randn(num_rows, 4, generator=generator),
        Columns.ACTIONS: actions,
        Columns.ACTION_DIST_INPUTS: logits,
        Columns.ACTION_LOGP: torch.log_softmax(logits, -1)[torch.arange(num_rows), actions],
        Columns.ADVANTAGES: torch.randn(num_rows, generator=generator),
        Columns.VALUE_TARGETS: 3 * torch.randn(num_rows, generator=generator),
        Columns.VF_PREDS: torch.randn(num_rows, generator=generator),
    }


def loss_by_formula(learner: PPOLearner, batch: dict[str, torch.Tensor]) -> float:
    """The mean over rows, one by one."""
    config = learner.config
    clip, vf_clip, vf_change = config.clip_param, config.vf_clip_param, config.vf_clip_change
    module = learner.module["default_policy"]
    logits = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS].double()
    values = module.compute_values(batch).double()
    total = 0.0
    for row, action in enumerate(batch[Columns.ACTIONS].tolist()):
        new = torch.log_softmax(logits[row], -1)
        old = torch.log_softmax(batch[Columns.ACTION_DIST_INPUTS][row].double(), -1)
        ratio = (new[action] - batch[Columns.ACTION_LOGP][row].double()).exp().item()
        advantage = batch[Columns.ADVANTAGES][row].item()
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        value, target, old_value = (
            x[row].item() for x in (values, batch[Columns.VALUE_TARGETS], batch[Columns.VF_PREDS])
        )
        error = (value - target) ** 2
        if vf_change is not None:
            bounded = old_value + min(max(value - old_value, -vf_change), vf_change)
            error = max(error, (bounded - target) ** 2)
        total -= min(ratio * advantage, clipped * advantage)
        if config.use_critic:
            total += config.vf_loss_coeff * (error if vf_clip is None else min(error, vf_clip))
        if config.use_kl_loss:
            total += config.kl_coeff * (old.exp() * (old - new)).sum().item()
        total += config.entropy_coeff * (new.exp() * new).sum().item()
    return total / len(batch[Columns.ACTIONS])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vf_clip_param": 0.5, "vf_loss_coeff": 0.5, "clip_param": 0.1},
        {"entropy_coeff": 0.01, "kl_coeff": 0.0},
        {"use_kl_loss": False, "entropy_coeff": 0.1},
        {"use_critic": False},
        {"vf_clip_change": 0.2, "clip_param": 0.0},
        {"vf_clip_change": 0.35, "vf_clip_param": 2.0},
    ],
)
def test_the_loss_is_the_papers(settings: dict[str, Any]) -> None:
    config = ppo_config(minibatch_size=None, num_epochs=1, **settings)
    learner = ppo_learner(config)
    batch = ppo_batch()
    expected = loss_by_formula(learner, batch)
    results = learner.update(batch=batch)["default_policy"]
    assert results["total_loss"] == pytest.approx(expected, rel=1e-4)
    assert ("mean_kl_loss" in results) == config.use_kl_loss
    assert ("vf_loss" in results) == config.use_critic


def test_without_a_critic_advantages_are_discounted_returns() -> None:
    settings = {"use_critic": False, "use_gae": False, "gamma": 0.5, "standardize_advantages": "minibatch"}
    columns = ppo_learner(ppo_config(**settings)).prepare(episode_batch(6, 6)).columns["default_policy"]
    rewards, advantages = columns[Columns.REWARDS].view(2, 6), columns[Columns.ADVANTAGES].view(2, 6)
    for t in range(6):
        assert torch.allclose(advantages[:, t], (rewards[:, t:] * 0.5 ** torch.arange(6 - t)).sum(1))


@pytest.mark.parametrize(("kl_target", "factor"), [(1e-9, 1.5), (1e9, 0.5)])
def test_the_kl_coefficient_aims_at_its_target(kl_target: float, factor: float) -> None:
    learner = ppo_learner(ppo_config(kl_target=kl_target, kl_coeff=0.2))
    for power in (1, 2):
        results = learner.update(episodes=episode_batch(40, 24))["default_policy"]
        assert results["curr_kl_coeff"] == pytest.approx(0.2 * factor**power)


def test_an_update_ends_with_the_epoch_that_moves_the_policy_too_far() -> None:
    def num_steps(**training: Any) -> tuple[int, float]:
        learner = ppo_learner(ppo_config(num_epochs=10, minibatch_size=16, lr=0.01, **training))
        results = learner.update(episodes=episode_batch(40, 24))
        assert results["default_policy"]["entropy"] > 0.0
        return results["__all_modules__"]["num_gradient_updates"], results["default_policy"]["approx_kl"]

    assert num_steps()[0] == 40
    assert num_steps(target_kl=1e9)[0] == 40
    steps, moved = num_steps(target_kl=1e-3)
    assert steps in range(4, 40, 4)
    assert moved > 1.5e-3


def test_advantages_are_standardized_over_a_minibatch_if_asked_for() -> None:
    learner = ppo_learner(ppo_config(minibatch_size=16, num_epochs=1, standardize_advantages="minibatch"))
    seen = []
    original = ppo_learner_module.ppo_loss

    def spy(**given: Any) -> Any:
        seen.append(given["advantages_B"])
        return original(**given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_learner_module, "ppo_loss", spy)
        learner.update(episodes=episode_batch(40, 24))
    assert len(seen) == 4
    for advantages in seen:
        assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-4)


def test_value_errors_are_not_clipped_by_default_and_clipped_rows_are_counted() -> None:
    def results(**training: Any) -> Any:
        return ppo_learner(ppo_config(**training)).update(episodes=episode_batch(40, 24))["default_policy"]

    assert PPOConfig().vf_clip_param is None
    assert "vf_clip_fraction" not in results()
    assert results(vf_clip_param=1e9)["vf_clip_fraction"] == 0.0
    assert results(vf_clip_param=1e-9)["vf_clip_fraction"] > 0.9


def test_the_entropy_coefficient_follows_its_schedule() -> None:
    learner = ppo_learner(ppo_config(entropy_coeff=[(0, 0.1), (1000, 0.0)]))
    used = []
    for num_env_steps in (500, 1000, 1500):
        results = learner.update(
            episodes=episode_batch(40, 24), timesteps={"num_env_steps_sampled_lifetime": num_env_steps}
        )
        used.append(results["default_policy"]["curr_entropy_coeff"])
    assert used == pytest.approx([0.1, 0.05, 0.0])


def test_value_statistics_are_those_of_the_last_epochs_rows() -> None:
    learner = ppo_learner(ppo_config(minibatch_size=None, num_epochs=1))
    batch = ppo_batch()
    with torch.no_grad():
        values = learner.module["default_policy"].compute_values(batch)
    results = learner.update(batch=batch)["default_policy"]
    error = (batch[Columns.VALUE_TARGETS] - values).numpy()
    assert results["vf_loss_unclipped"] == pytest.approx(np.mean(error**2), rel=1e-5)
    explained = 1 - np.var(error) / np.var(batch[Columns.VALUE_TARGETS].numpy())
    assert results["vf_explained_var"] == pytest.approx(max(-1.0, explained), rel=1e-4)


PLAIN = PPOLossSettings(0.3, 10.0, 0.5, 0.02, 0.2)


def loss_inputs() -> dict[str, torch.Tensor]:
    """Six sequences of five steps, whose ratios are inside and far outside of the clip range."""
    names = ("logp_B", "values_B", "entropy_B", "kl_B", "old_logp_B", "advantages_B", "value_targets_B")
    generator = torch.Generator().manual_seed(1)
    given = {name: torch.randn(6, 5, dtype=torch.float64, generator=generator) for name in names}
    given["logp_B"][0] += 60.0
    for name in names[:4]:
        given[name].requires_grad_()
    return given


@pytest.mark.parametrize("num_real", [0, 1, 17])
def test_masked_rows_count_for_nothing_even_if_they_are_nan(num_real: int) -> None:
    given = loss_inputs()
    mask_B = (torch.randperm(30, generator=torch.Generator().manual_seed(1)) < num_real).view(6, 5)
    loss = ppo_loss(settings=PLAIN, mask_B=mask_B, **given).loss
    alone = ppo_loss(settings=PLAIN, **{name: column[mask_B] for name, column in given.items()}).loss
    assert float(loss.detach()) == pytest.approx(float(alone.detach()) if num_real else 0.0)
    gradients = torch.autograd.grad(loss, list(given.values())[:4])
    for name, value in itertools.product(given, (math.nan, math.inf)):
        spoilt = loss_inputs()
        spoilt[name].data[~mask_B] = value
        again = ppo_loss(settings=PLAIN, mask_B=mask_B, **spoilt).loss
        assert torch.equal(loss, again)
        for one, other in zip(gradients, torch.autograd.grad(again, list(spoilt.values())[:4]), strict=True):
            assert torch.equal(one, other)


def test_an_infinite_ratio_is_clipped_where_the_surrogate_is() -> None:
    given = loss_inputs()
    given["logp_B"] = (given["old_logp_B"] + 2000.0).requires_grad_()
    given["advantages_B"] = given["advantages_B"].abs() + 1.0
    terms = ppo_loss(settings=PLAIN, **given)
    assert math.isfinite(terms.policy_loss)
    assert not bool(torch.autograd.grad(terms.loss, [given["logp_B"]])[0].any())
    given["advantages_B"] = -given["advantages_B"]
    assert ppo_loss(settings=PLAIN, **given).policy_loss > 1e30


@pytest.mark.parametrize("name", ["logp_B", "values_B", "old_logp_B", "advantages_B"])
def test_nan_is_not_hidden(name: str) -> None:
    given = loss_inputs()
    given[name].data[3] = math.nan
    assert math.isnan(ppo_loss(settings=PLAIN, **given).loss.detach())


# -- IMPALA and APPO -----------------------------------------------------------------------------------


def test_impala_terms() -> None:
    terms = impala_loss_terms(
        logp_B=torch.tensor([-1.0, -2.0, -9.0]),
        advantages_B=torch.tensor([3.0, -1.0, 9.0]),
        values_B=torch.tensor([1.0, 2.0, 9.0]),
        value_targets_B=torch.tensor([3.0, 1.0, 0.0]),
        entropy_B=torch.tensor([0.5, 0.25, 9.0]),
        mask_B=torch.tensor([True, True, False]),
    )
    assert float(terms.policy_loss) == pytest.approx(-(-1.0 * 3.0 + -2.0 * -1.0) / 2)
    assert float(terms.value_loss) == pytest.approx(0.5 * (4.0 + 1.0) / 2)
    assert float(terms.entropy) == pytest.approx(0.75 / 2)
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


@pytest.mark.parametrize("config_class", [IMPALAConfig, APPOConfig])
def test_a_prepared_batch_trains_as_its_episodes_do(config_class: Any) -> None:
    weights = []
    for is_prepared in (False, True):
        config = config_class().environment(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
        config.debugging(seed=0).training(train_batch_size_per_learner=30)
        if config_class is APPOConfig:
            config.training(use_circular_buffer=False)
        learner = config.build_learner()
        data = episode_batch(10, 10, 10)
        learner.update(**{"batch": learner.prepare(data).columns} if is_prepared else {"episodes": data})
        parameters = learner.module["default_policy"].parameters()
        weights.append(np.concatenate([parameter.detach().numpy().ravel() for parameter in parameters]))
    # tanh differs in the last bits without a graph, and Adam makes small gradients large
    np.testing.assert_allclose(*weights, atol=1e-5)
