"""IMPALA's loss: policy gradient, value error, entropy bonus (arXiv:1802.01561, section 4.2).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful
ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["IMPALALossTerms", "impala_loss_terms"]


class IMPALALossTerms(NamedTuple):
    """Sums over the real rows of a minibatch and their number, 0-d tensors."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    num_rows: Tensor


def impala_loss_terms(
    *,
    logp_B: Tensor,
    advantages_B: Tensor,
    values_B: Tensor,
    value_targets_B: Tensor,
    entropy_B: Tensor,
    mask_B: Tensor | None = None,
) -> IMPALALossTerms:
    """Return the three terms of the loss.

    Args:
        logp_B: Log-probability of the actions under the trained policy.
        advantages_B: V-trace advantages, not standardized.
        values_B: Predictions of the trained value function.
        value_targets_B: V-trace targets.
        entropy_B: Entropy of the trained policy.
        mask_B: Whether entries are real; None: all.
    """
    if mask_B is None:
        mask_B = torch.ones_like(logp_B, dtype=torch.bool)

    def masked_sum(terms_B: Tensor) -> Tensor:
        return torch.where(mask_B, terms_B, 0.0).sum()

    return IMPALALossTerms(
        policy_loss=-masked_sum(logp_B * advantages_B),
        value_loss=0.5 * masked_sum((values_B - value_targets_B).square()),
        entropy=masked_sum(entropy_B),
        num_rows=mask_B.sum().clamp(min=1),
    )
