"""TQC's critic loss (arXiv:2005.04269, section 4).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics, ``Q`` quantiles of a critic, ``K`` quantiles in a target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlzmq.algorithms.sac.sac_loss import CriticLoss
from rlzmq.learners.losses import ErrorLoss, error_loss

__all__ = ["quantile_critic_loss", "quantile_targets"]


def quantile_targets(
    *,
    next_q_BCQ: Tensor,
    num_dropped: int,
    next_logp_B: Tensor,
    rewards_B: Tensor,
    discounts_B: Tensor,
    alpha: Tensor,
) -> Tensor:
    """Return r + discount · (z - α log π') for the smallest quantiles z of all critics together, float [B, K].

    Args:
        next_q_BCQ: The target critics' quantiles for the policy's next actions.
        num_dropped: Number of largest quantiles to leave out.
        next_logp_B, rewards_B, discounts_B, alpha: See `sac_loss.critic_targets`.
    """
    pooled_BK = next_q_BCQ.flatten(1).sort(-1).values
    kept_BK = pooled_BK[:, : pooled_BK.shape[1] - num_dropped]
    soft_BK = kept_BK - (alpha * next_logp_B)[:, None]
    return (rewards_B[:, None] + discounts_B[:, None] * soft_BK).detach()


def quantile_critic_loss(
    *, q_BCQ: Tensor, targets_BK: Tensor, weights_B: Tensor, kind: ErrorLoss
) -> CriticLoss:
    """Return each critic's weighted mean quantile loss.

    Each row's loss is the mean over all pairs of a quantile and a target. TD errors are the distances of the means.

    Args:
        q_BCQ: Each critic's quantiles for the actions taken, at the fractions (i + ½) / Q.
        targets_BK: See `quantile_targets`.
        weights_B: Importance weights.
        kind: See `ErrorLoss`; of the quantile Huber loss, or its square.
    """
    num_quantiles = q_BCQ.shape[-1]
    fractions_Q = (torch.arange(num_quantiles, device=q_BCQ.device) + 0.5) / num_quantiles
    errors_BCQK = targets_BK[:, None, None, :] - q_BCQ[..., None]
    of_errors_BCQK = error_loss(errors_BCQK, torch.zeros_like(errors_BCQK), kind)
    slopes_BCQK = (fractions_Q[:, None] - (errors_BCQK < 0.0).float()).abs()
    losses_BC = (slopes_BCQK * of_errors_BCQK).mean((-2, -1))
    td_errors_B = (q_BCQ.mean((1, 2)) - targets_BK.mean(-1)).abs().detach()
    return CriticLoss((weights_B[:, None] * losses_BC).mean(0), td_errors_B)
