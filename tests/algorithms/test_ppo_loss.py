"""PPO's loss and its gradient against the formula."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlzmq.algorithms.ppo.ppo_learner import PPOLossSettings, PPOLossTerms, ppo_loss
from rlzmq.learners.train_batch import masked_mean

CLIP = 0.3
PLAIN = PPOLossSettings(CLIP, 10.0, 0.5, 0.02, 0.2)
# (log of the ratio, advantage): inside and outside the clip range, on its borders, far out, without advantage.
ROWS = list(
    itertools.product(
        [0.0, 0.1, -0.1, 1.0, -1.0, math.log(1 + CLIP), math.log(1 - CLIP), 60.0, -60.0, -800.0],
        [1.5, -1.5, 0.0, 1e-30, -1e6],
    )
)


def inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(ROWS)

    def normal() -> Tensor:
        return torch.randn(num_rows, dtype=torch.float64, generator=generator)

    log_ratio_B, advantages_B = torch.tensor(ROWS, dtype=torch.float64).unbind(1)
    targets_B = normal()
    # Squared errors of 9, 10 (the bound, as exactly as possible) and far beyond it.
    values_B = targets_B + torch.tensor([0.5, -3.0, math.sqrt(10.0), 40.0, 0.0]).repeat(num_rows // 5)
    old_logp_B = -normal().abs()
    return {
        "logp_B": old_logp_B + log_ratio_B,
        "values_B": values_B,
        "entropy_B": normal().abs(),
        "kl_B": normal().abs(),
        "old_logp_B": old_logp_B,
        "advantages_B": advantages_B,
        "value_targets_B": targets_B,
        "old_values_B": values_B + torch.tensor([0.1, -0.3, 0.4, -40.0, 40.0]).repeat(num_rows // 5),
    }


def by_formula(settings: PPOLossSettings, mask_B: Tensor | None = None, **given: Any) -> list[Tensor | None]:
    ratio_B = torch.exp(given["logp_B"] - given["old_logp_B"])
    clipped_B = ratio_B.clamp(1.0 - settings.clip_param, 1.0 + settings.clip_param)
    surrogate_B = torch.minimum(given["advantages_B"] * ratio_B, given["advantages_B"] * clipped_B)
    policy_loss = loss = -masked_mean(surrogate_B, mask_B)
    vf_loss = entropy = mean_kl = None
    if given["values_B"] is not None:
        error_B = (given["values_B"] - given["value_targets_B"]).square()
        if settings.vf_clip_change is not None:
            change_B = (given["values_B"] - given["old_values_B"]).clamp(
                -settings.vf_clip_change, settings.vf_clip_change
            )
            bounded_B = given["old_values_B"] + change_B - given["value_targets_B"]
            error_B = torch.maximum(error_B, bounded_B.square())
        if settings.vf_clip_param is not None:
            error_B = error_B.clamp(max=settings.vf_clip_param)
        vf_loss = masked_mean(error_B, mask_B)
        loss = loss + settings.vf_loss_coeff * vf_loss
    if given["entropy_B"] is not None:
        entropy = masked_mean(given["entropy_B"], mask_B)
        loss = loss - settings.entropy_coeff * entropy
    if given["kl_B"] is not None:
        mean_kl = masked_mean(given["kl_B"], mask_B)
        loss = loss + settings.kl_coeff * mean_kl
    return [loss, policy_loss, vf_loss, entropy, mean_kl]


TRAINED = ("logp_B", "values_B", "entropy_B", "kl_B")


def differentiated(terms: Any, given: dict[str, Any]) -> list[Tensor | None]:
    mine = [given[name] for name in TRAINED if given[name] is not None]
    return list(torch.autograd.grad(3.0 * terms[0], mine, allow_unused=True, retain_graph=True))


def assert_as_by_formula(
    settings: PPOLossSettings, given: dict[str, Any], mask_B: Tensor | None = None
) -> PPOLossTerms:
    for name in TRAINED:
        if given[name] is not None:
            given[name] = given[name].detach().requires_grad_()
    terms = ppo_loss(settings=settings, mask_B=mask_B, **given)
    expected = by_formula(settings, mask_B, **given)
    for mine, theirs in zip(terms, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)
            assert mine.requires_grad == (mine is terms.loss)
    for mine, theirs in zip(differentiated(terms, given), differentiated(expected, given), strict=True):
        if theirs is not None and bool(theirs.any()):
            assert mine is not None
            rtol = 1e-12 if mask_B is None else 1e-7  # the number of real rows is a float32
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-14)
        else:
            assert mine is None or not bool(mine.any())
    return terms


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        PLAIN._replace(vf_clip_param=None),
        PLAIN._replace(vf_clip_param=None, vf_clip_change=0.2),
        PLAIN._replace(vf_clip_change=0.35),
        PLAIN._replace(entropy_coeff=0.0, kl_coeff=0.0),
        PLAIN._replace(vf_loss_coeff=0.0, clip_param=0.0),
    ],
)
def test_the_loss_is_that_of_the_formula(settings: PPOLossSettings) -> None:
    assert_as_by_formula(settings, inputs())


@pytest.mark.parametrize("absent", [*TRAINED[1:], TRAINED[1:]])
def test_terms_may_be_absent(absent: str | tuple[str, ...]) -> None:
    names = (absent,) if isinstance(absent, str) else absent
    assert_as_by_formula(PLAIN, {**inputs(), **dict.fromkeys(names)})


@pytest.mark.parametrize("num_real", [0, 1, 17, len(ROWS)])
def test_masked_rows_count_for_nothing_even_if_they_are_nan(num_real: int) -> None:
    mask_B = torch.zeros(len(ROWS), dtype=torch.bool)
    mask_B[torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))[:num_real]] = True
    given = {name: values_B.view(-1, 5) for name, values_B in inputs().items()}
    terms = assert_as_by_formula(PLAIN, given, mask_B.view(-1, 5))
    if num_real in (1, 17):
        spoilt = {name: values_B.detach().clone() for name, values_B in given.items()}
        for name, value in zip(spoilt, itertools.cycle([math.nan, math.inf, -math.inf]), strict=False):
            spoilt[name][~mask_B.view(-1, 5)] = value
        for name in TRAINED:
            spoilt[name].requires_grad_()
        again = ppo_loss(settings=PLAIN, mask_B=mask_B.view(-1, 5), **spoilt)
        assert torch.equal(again.loss, terms.loss)
        for mine, theirs in zip(differentiated(again, spoilt), differentiated(terms, given), strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)


def test_an_infinite_ratio_is_clipped_where_the_surrogate_is() -> None:
    given = inputs()
    given["logp_B"] = given["old_logp_B"] + 2000.0
    given["advantages_B"] = given["advantages_B"].abs() + 1.0
    given["logp_B"].requires_grad_()
    terms = ppo_loss(settings=PLAIN, **given)
    assert math.isfinite(terms.policy_loss)
    (gradient_B,) = torch.autograd.grad(terms.loss, [given["logp_B"]])
    assert not bool(gradient_B.any())
    given["advantages_B"] = -given["advantages_B"]
    assert ppo_loss(settings=PLAIN, **given).policy_loss > 1e30


@pytest.mark.parametrize("name", ["logp_B", "values_B", "old_logp_B", "advantages_B"])
def test_nan_is_not_hidden(name: str) -> None:
    given = inputs()
    given[name][3] = math.nan
    assert math.isnan(ppo_loss(settings=PLAIN, **given).loss)
