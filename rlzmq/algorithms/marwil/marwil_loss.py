"""MARWIL's loss (Wang et al., "Exponentially Weighted Imitation Learning for Batched Historical Data", NeurIPS 2018).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlzmq.learners.losses import masked_mean

__all__ = ["MARWILLossTerms", "marwil_loss_terms"]

# Bound of the weights' exponent, far above any advantage that a policy learns from, so that weights cannot overflow.
_MAX_EXPONENT = 20.0


class MARWILLossTerms(NamedTuple):
    """Means over the real rows of a minibatch, 0-d tensors, and the updated norm."""

    policy_loss: Tensor
    value_loss: Tensor
    explained_variance: Tensor
    norm: Tensor


def marwil_loss_terms(
    *,
    logp_B: Tensor,
    values_B: Tensor,
    value_targets_B: Tensor,
    norm: Tensor,
    beta: float,
    update_rate: float,
    mask_B: Tensor | None = None,
    log_std_B: Tensor | None = None,
    log_std_coeff: float = 0.0,
) -> MARWILLossTerms:
    """Return the terms of the loss.

    With A = target - V(s), c² ← c² + rate (mean A² - c²) and w = exp(beta A / c), which is not differentiated, the
    policy loss is -mean(w (log π(a|s) + coeff · log σ)), and the value loss ½ mean A².

    Args:
        logp_B: Log-probability of the recorded actions under the trained policy.
        values_B: Predictions of the trained value function.
        value_targets_B: Targets of these predictions.
        norm: c² before this minibatch, float64, 0-d.
        beta: Strength of the weighting; 0: all weights are 1.
        update_rate: Rate of the moving average.
        mask_B: Whether entries are real; None: all.
        log_std_B: log σ, the mean log standard deviation of the policy's dimensions; None: the policy has none.
        log_std_coeff: Weight of it.
    """
    if log_std_B is not None:
        logp_B = logp_B + log_std_coeff * log_std_B
    advantages_B = value_targets_B - values_B
    mean_square = masked_mean(advantages_B.square(), mask_B)
    moved = norm + update_rate * (mean_square.detach().double() - norm)
    norm = torch.where(moved.isfinite(), moved, norm)
    exponents_B = beta * advantages_B.detach() / (1e-8 + norm.sqrt().float())
    weights_B = exponents_B.clamp(max=_MAX_EXPONENT).exp()
    error_variance, target_variance = (
        masked_mean((rows - masked_mean(rows, mask_B)).square(), mask_B)
        for rows in (advantages_B.detach(), value_targets_B)
    )
    return MARWILLossTerms(
        policy_loss=-masked_mean(weights_B * logp_B, mask_B),
        value_loss=0.5 * mean_square,
        explained_variance=(1.0 - error_variance / target_variance.clamp(min=1e-12)).clamp(min=-1.0),
        norm=norm,
    )
