"""TQCLearner: SAC with quantile critics (arXiv:2005.04269, section 4).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics, ``Q`` quantiles of a critic, ``K`` quantiles in a target.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rlzmq.algorithms.sac.sac_learner import CriticLoss, SACLearner
from rlzmq.algorithms.sac.sac_module import DefaultSACModule, require_box
from rlzmq.algorithms.tqc import TQCTrainingSettings
from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.replay_learner import importance_weights
from rlzmq.learners.target_network_learner import ErrorLoss, discounts, target_outputs

__all__ = ["DefaultTQCModule", "TQCLearner", "quantile_critic_loss", "quantile_targets"]


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
        next_logp_B, rewards_B, discounts_B, alpha: See `sac_learner.critic_targets`.
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
    fractions_Q = torch.arange(0.5, num_quantiles, dtype=q_BCQ.dtype, device=q_BCQ.device) / num_quantiles
    # Values and gradient in closed form, in a few passes over all pairs: autograd would take twice as many.
    with torch.no_grad():
        errors_BCQK = targets_BK[:, None, None, :] - q_BCQ[..., None]
        bounded_BCQK = errors_BCQK.clamp(-1.0, 1.0) if kind == "huber" else errors_BCQK
        # Times scales_Q, they are multiplied by the fraction, or by 1 - fraction where negative.
        slopes_BCQK = torch.prelu(bounded_BCQK.flatten(0, 1), 1.0 / fractions_Q - 1.0).view_as(bounded_BCQK)
        scales_Q = fractions_Q if kind == "huber" else 2.0 * fractions_Q  # a square is twice its Huber loss
        slopes_BCQ = scales_Q * slopes_BCQK.mean(-1)
        losses_BCQ = scales_Q * slopes_BCQK.mul_(errors_BCQK.sub_(bounded_BCQK, alpha=0.5)).mean(-1)
    losses_BCQ = losses_BCQ - (q_BCQ - q_BCQ.detach()) * slopes_BCQ
    losses_C = (weights_B[:, None] * losses_BCQ.mean(-1)).mean(0)
    return CriticLoss(losses_C, (q_BCQ.detach().mean((1, 2)) - targets_BK.mean(-1)).abs())


class DefaultTQCModule(DefaultSACModule):
    """Policy and quantile critics for Box actions.

    `model_config`: fields of a DefaultModelConfig, and ``n_critics``, ``n_quantiles`` and ``initial_alpha`` (see
    `TQCConfig`). ``qf_preds`` and ``q_target_next`` are [B, C, Q]; ``q_curr`` is the mean of all quantiles.
    """

    def setup(self) -> None:
        require_box(self, "TQC", "SAC for Discrete actions, PPO for others")
        super().setup()

    def _predictions(self, outputs: Tensor) -> Tensor:
        return outputs

    def _combined(self, outputs: Tensor) -> Tensor:
        return outputs.mean((1, 2))

    @torch.no_grad()
    def forward_target(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return ``q_target_next`` [B, C, Q] and ``logp_next_resampled`` [B] for the policy's actions at ``obs``."""
        logits, obs = self._logits(batch[Columns.OBS])
        values, logp = self._values_of_policy(logits, obs, self.target_qfs)
        return {"q_target_next": values, "logp_next_resampled": logp}


class TQCLearner(SACLearner):
    """Trains modules like `DefaultTQCModule` (arXiv:2005.04269)."""

    def compute_critic_loss(
        self, module: Any, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any], alpha: Tensor
    ) -> CriticLoss:
        settings = cast(TQCTrainingSettings, config)
        target = target_outputs(module, {Columns.OBS: batch[Columns.NEXT_OBS]})
        next_q_BCQ = target["q_target_next"]
        targets_BK = quantile_targets(
            next_q_BCQ=next_q_BCQ,
            num_dropped=settings.top_quantiles_to_drop_per_net * next_q_BCQ.shape[1],
            next_logp_B=target["logp_next_resampled"],
            rewards_B=batch[Columns.REWARDS].float(),
            discounts_B=discounts(batch, config.gamma),
            alpha=alpha,
        )
        return quantile_critic_loss(
            q_BCQ=fwd_out["qf_preds"],
            targets_BK=targets_BK,
            weights_B=importance_weights(batch),
            kind=settings.td_error_loss_fn,
        )
