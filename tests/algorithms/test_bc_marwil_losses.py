"""BC's and MARWIL's losses against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlzmq import Columns
from rlzmq.algorithms.bc.bc_learner import bc_loss
from rlzmq.algorithms.marwil.marwil_learner import marwil_loss_terms, with_burn_in


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
    extended = [[1, 2, 3, 0, 0], [2, 3, 4, 5, 6], [5, 6, 7, 0, 0], [8, 9, 10, 0, 0]]
    assert found[Columns.OBS]["a"].squeeze(-1).tolist() == extended
    assert (found[Columns.OBS]["a"].squeeze(-1) * found[Columns.LOSS_MASK]).tolist() == [
        [1, 2, 3, 0, 0], [0, 0, 4, 5, 6], [0, 0, 7, 0, 0], [8, 9, 10, 0, 0]
    ]  # fmt: skip
    assert found[Columns.SEQ_LENS].tolist() == [3, 5, 3, 3]
    assert found[Columns.STATE_IN] is columns[Columns.STATE_IN]
