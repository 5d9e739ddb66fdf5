"""Losses of the offline algorithms against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import Columns, ConfigurationError, CQLConfig, IQLConfig
from rlzmq.algorithms.bc.bc_learner import bc_loss
from rlzmq.algorithms.cql.cql_learner import cloning_loss, conservative_penalty
from rlzmq.algorithms.iql.iql_learner import expectile_loss, extraction_loss
from rlzmq.algorithms.marwil.marwil_learner import marwil_loss_terms, with_burn_in
from tests.support.losses import loss_of, one_layer, set_layer, transitions


def test_the_penalty_is_a_soft_maximum_of_sampled_actions_above_the_recorded_one() -> None:
    """Two critics, one row, two actions, drawn with densities 1/2 and 1/4; values in logarithms of whole numbers."""
    given: dict[str, Any] = {
        "sampled_q_BCN": torch.log(torch.tensor([[[1.0, 2.0], [3.0, 1.0]]])),
        "log_densities_BN": torch.log(torch.tensor([[0.5, 0.25]])),
        "q_BC": torch.tensor([[1.0, 0.5]]),
    }
    # Σ e^q / density: 1·2 + 2·4 = 10, and 3·2 + 1·4 = 10.
    found = conservative_penalty(**given, temperature=1.0)
    assert float(found) == pytest.approx(2 * math.log(10.0) - 1.5)
    # At T = 1/2: ½ log Σ (e^q / density)², of 4 + 64 and of 36 + 16.
    found = conservative_penalty(**given, temperature=0.5)
    assert float(found) == pytest.approx(0.5 * (math.log(68.0) + math.log(52.0)) - 1.5)


def test_cqls_loss_of_imitation() -> None:
    found = cloning_loss(
        recorded_logp_B=torch.tensor([-1.0, -3.0]),
        logp_B=torch.tensor([2.0, 4.0]),
        alpha=torch.tensor(0.5),
    )
    assert float(found) == 0.5 * 3.0 + 2.0


def test_the_expectile_loss_weights_positive_advantages_more() -> None:
    advantages = torch.tensor([2.0, -1.0, 0.0])
    loss = expectile_loss(advantages, 0.75)
    assert float(loss) == pytest.approx((0.75 * 4.0 + 0.25 * 1.0) / 3)
    assert float(expectile_loss(advantages, 0.5)) == pytest.approx(0.5 * 5.0 / 3)


def test_a_larger_beta_is_greedier_and_weights_are_bounded() -> None:
    given: dict[str, Any] = {
        "logp_B": torch.log(torch.tensor([0.5, 0.25])),
        "advantages_B": torch.tensor([1.0, -1.0], requires_grad=True),
    }
    for beta in (0.0, 0.5, 3.0):
        loss = extraction_loss(**given, beta=beta)
        expected = (math.exp(beta) * math.log(2) + math.exp(-beta) * 2 * math.log(2)) / 2
        assert float(loss) == pytest.approx(expected, rel=1e-6)
        assert not loss.requires_grad
    bounded = extraction_loss(logp_B=torch.tensor([-1.0]), advantages_B=torch.tensor([1e6]), beta=1.0)
    assert float(bounded) == 100.0


# -- whole learners ---------------------------------------------------------------------------------


BOX = gym.spaces.Box(-2.0, 2.0, (1,))


def batch(num: int = 2) -> dict[str, Any]:
    return transitions(num, terminateds=[False] * (num - 1) + [True])


def stat(made: Any, name: str) -> float:
    return float(made.report.mean(name, 1)["default_policy"])


def test_cqls_backup_has_no_entropy_and_its_penalty_the_known_value_of_constant_critics() -> None:
    made = one_layer(CQLConfig, BOX, gamma=0.5, num_actions=4).build_learner()
    module = made.module["default_policy"]
    for critic, target in zip(module.qfs, module.target_qfs, strict=True):
        set_layer(critic, 0.0, 2.0)
        set_layer(target, 0.0, 6.0)
    loss_of(made, batch())
    for name in ("qf_loss", "qf_twin_loss"):
        assert stat(made, name) == pytest.approx(((2.0 - 4.0) ** 2 + (2.0 - 1.0) ** 2) / 2)
    values, logp = module.values_of_sampled_actions(batch(), 4)
    assert values.shape == (2, 2, 12)
    assert logp.shape == (2, 12)
    assert torch.equal(values, torch.full_like(values, 2.0))
    assert torch.allclose(logp[:, :4], torch.full((2, 4), -math.log(2.0)))


def test_sampled_actions_lie_in_the_modules_range_and_belong_to_their_rows() -> None:
    made = one_layer(CQLConfig, BOX).build_learner()
    module = made.module["default_policy"]
    set_layer(module.qfs[0], [0.0, 0.0, 1.0], 0.0)  # the value is the action
    with torch.no_grad():
        for parameter in (*module.pi_encoder.parameters(), *module.pi.parameters()):
            parameter.zero_()
    rows = batch(3)
    values, logp = module.values_of_sampled_actions(rows, 200)
    actions = values[:, 0].detach()
    assert float(actions.abs().max()) <= 1.0
    uniform = actions[:, :200]
    assert float(uniform.min()) < -0.9
    assert float(uniform.max()) > 0.9
    # The policy is a standard Gaussian through tanh at each of the three states.
    drawn = actions[:, 200:].double()
    raw = drawn.atanh()
    expected = -0.5 * raw.square() - 0.5 * math.log(2 * math.pi) - (1 - drawn.square()).log()
    assert torch.allclose(logp[:, 200:].double(), expected, atol=1e-2)


def test_cqls_policy_clones_for_bc_iters_minibatches_over_all_updates() -> None:
    made = one_layer(CQLConfig, BOX, bc_iters=3).build_learner()
    seen = []
    for _ in range(5):
        loss_of(made, batch())
        seen.append(made._is_cloning)
        made.report.num_gradient_updates_lifetime += 1
    assert seen == [True, True, True, False, False]


def test_iqls_learner_uses_the_target_critics_and_its_value_function() -> None:
    made = one_layer(IQLConfig, BOX, gamma=0.5, expectile=0.75).build_learner()
    module = made.module["default_policy"]
    assert not hasattr(module, "log_alpha")
    for index, (critic, target) in enumerate(zip(module.qfs, module.target_qfs, strict=True)):
        set_layer(critic, 0.0, 2.0)
        set_layer(target, 0.0, 6.0 + index)
    set_layer(module.vf, 0.0, 4.0)
    loss = loss_of(made, batch())
    assert stat(made, "value_loss") == pytest.approx(0.75 * 2.0**2)
    for name in ("qf_loss", "qf_twin_loss"):
        assert stat(made, name) == pytest.approx(((1.0 + 0.5 * 4.0 - 2.0) ** 2 + (1.0 - 2.0) ** 2) / 4)
    loss.backward()
    assert all(parameter.grad is None for parameter in module.target_qfs.parameters())
    # Each loss reaches its own parameters: dL/dV = -2 · 0.75 · 2, dL/dq = (2 - 3) and (2 - 1), half each.
    assert float(module.vf.head.layers[0].bias.grad) == pytest.approx(-3.0)
    assert float(module.qfs[0].head.layers[0].bias.grad) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("config_class", [CQLConfig, IQLConfig])
def test_actions_outside_of_the_range_count_as_the_environment_clips_them(config_class: Any) -> None:
    made = one_layer(config_class, BOX).build_learner()
    module = made.module["default_policy"]
    inside, outside = batch(), batch()
    inside[Columns.ACTIONS] += 1.0
    outside[Columns.ACTIONS] += 1.7
    one, other = (module.forward_train(rows)["qf_preds"] for rows in (inside, outside))
    assert torch.equal(one, other)


@pytest.mark.parametrize("config_class", [CQLConfig, IQLConfig])
def test_settings_without_effect_are_refused(config_class: Any) -> None:
    name = config_class.__name__.removesuffix("Config")
    config = config_class().environment("Pendulum-v1").offline_data(input_="data")
    config.copy().validate()
    for change, words in (
        (lambda c: c.training(lr=0.1), f"{name} has several optimizers. Set actor_lr, critic_lr and"),
        (lambda c: c.environment(normalize_actions=False), "normalize_actions=False"),
        (lambda c: c.offline_data(input_=None), "input_ is None"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            change(config.copy()).validate()


def test_an_expectile_lies_between_0_and_1() -> None:
    with pytest.raises(ConfigurationError, match=r"expectile=1\.0"):
        IQLConfig().environment("Pendulum-v1").offline_data(input_="data").training(expectile=1.0).validate()


def test_bc_is_minus_the_mean_log_likelihood() -> None:
    logp = torch.log(torch.tensor([0.5, 0.25, 0.125]))
    assert bc_loss(logp).item() == pytest.approx(2 * math.log(2))  # (1 + 2 + 3) / 3 halvings
    mask = torch.tensor([True, False, True])
    assert bc_loss(logp, mask).item() == pytest.approx(2 * math.log(2))  # (1 + 3) / 2
    assert bc_loss(logp, torch.tensor([True, True, False])).item() == pytest.approx(1.5 * math.log(2))


def terms(**changes: Any) -> Any:
    """Advantages are 3 and -4, so their mean square is 12.5; c² moves from 4 by half of the way, to 8.25."""
    given: dict[str, Any] = {
        "logp_B": torch.log(torch.tensor([0.5, 0.25])),
        "values_B": torch.tensor([1.0, 2.0], requires_grad=True),
        "value_targets_B": torch.tensor([4.0, -2.0]),
        "norm": torch.tensor(4.0, dtype=torch.float64),
        "beta": 0.5,
        "update_rate": 0.5,
    }
    return marwil_loss_terms(**{**given, **changes})


def test_marwil_weights_steps_by_their_normalised_advantages() -> None:
    found = terms()
    norm = 4.0 + 0.5 * (12.5 - 4.0)
    assert found.norm.item() == norm == 8.25
    weights = math.exp(0.5 * 3.0 / math.sqrt(norm)), math.exp(0.5 * -4.0 / math.sqrt(norm))
    expected = (weights[0] * math.log(2) + weights[1] * 2 * math.log(2)) / 2
    assert found.policy_loss.item() == pytest.approx(expected, rel=1e-6)
    assert found.value_loss.item() == pytest.approx(6.25)
    # targets 4 and -2: variance 9; errors 3 and -4: variance 12.25
    assert found.explained_variance.item() == pytest.approx(1 - 12.25 / 9, rel=1e-6)


def test_marwils_weights_are_not_differentiated() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    found = terms(values_B=values)
    assert not found.policy_loss.requires_grad
    found.value_loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [-1.5, 2.0]  # (V - target) / 2


def test_marwil_without_beta_is_bc() -> None:
    logp = torch.log(torch.tensor([0.5, 0.25]))
    assert terms(beta=0.0).policy_loss.item() == pytest.approx(bc_loss(logp).item())


def test_masked_rows_count_for_nothing() -> None:
    padded = terms(
        logp_B=torch.tensor([math.log(0.5), math.log(0.25), 100.0]),
        values_B=torch.tensor([1.0, 2.0, 50.0]),
        value_targets_B=torch.tensor([4.0, -2.0, -70.0]),
        mask_B=torch.tensor([True, True, False]),
    )
    for one, other in zip(terms(), padded, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=1e-6)


def test_the_default_norm_hardly_moves_and_keeps_its_digits() -> None:
    norm = torch.tensor(100.0, dtype=torch.float64)
    for _ in range(3):
        norm = terms(norm=norm, update_rate=1e-8).norm
    assert norm.item() == pytest.approx(100.0 - 3 * 87.5e-8, abs=1e-12)
    assert norm.item() != 100.0


def test_outliers_do_not_overflow_and_nan_does_not_stay_in_the_norm() -> None:
    huge = terms(value_targets_B=torch.tensor([1e6, -2.0]), update_rate=0.0)
    assert np.isfinite(huge.policy_loss.item())
    assert terms(value_targets_B=torch.tensor([math.nan, -2.0])).norm.item() == 4.0


def test_the_log_standard_deviation_is_weighted_like_the_likelihood() -> None:
    found = terms(log_std_B=torch.tensor([0.5, -1.0]), log_std_coeff=2.0)
    norm = 8.25
    weights = math.exp(0.5 * 3.0 / math.sqrt(norm)), math.exp(0.5 * -4.0 / math.sqrt(norm))
    expected = (weights[0] * (math.log(2) - 1.0) + weights[1] * (2 * math.log(2) + 2.0)) / 2
    assert found.policy_loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_burn_in_is_the_end_of_the_episodes_previous_sequence() -> None:
    """Two episodes of 7 and 3 steps, in sequences of 3."""
    steps = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 0, 0], [8, 9, 10]])
    columns = {
        Columns.OBS: {"a": steps[..., None]},
        Columns.TERMINATEDS: steps == 10,
        Columns.TRUNCATEDS: steps == 7,
        Columns.LOSS_MASK: steps > 0,
        Columns.STATE_IN: {"h": torch.zeros(4, 1)},
        Columns.SEQ_LENS: torch.tensor([3, 3, 1, 3]),
    }
    found = with_burn_in(columns, 2)
    extended = [[1, 2, 3, 3, 3], [2, 3, 4, 5, 6], [5, 6, 7, 0, 0], [8, 9, 10, 10, 10]]
    assert found[Columns.OBS]["a"].squeeze(-1).tolist() == extended
    assert (found[Columns.OBS]["a"].squeeze(-1) * found[Columns.LOSS_MASK]).tolist() == [
        [1, 2, 3, 0, 0], [0, 0, 4, 5, 6], [0, 0, 7, 0, 0], [8, 9, 10, 0, 0]
    ]  # fmt: skip
    assert found[Columns.SEQ_LENS].tolist() == [3, 5, 3, 3]
    assert found[Columns.STATE_IN] is columns[Columns.STATE_IN]
