"""CQLLearner: SAC on recorded steps, with conservative critics (arXiv:2006.04779, equation 4 and appendix F).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics, ``N`` sampled actions.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from rlzmq.algorithms.cql import CQLTrainingSettings
from rlzmq.algorithms.sac.sac_learner import CriticLoss, SACLearner
from rlzmq.algorithms.sac.sac_module import DefaultSACModule, critic_values, require_box
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.learners.offline_learner import OfflineLearner

__all__ = [
    "CQLLearner",
    "DefaultCQLModule",
    "cloning_loss",
    "conservative_penalty",
]


def conservative_penalty(
    *, sampled_q_BCN: Tensor, log_densities_BN: Tensor, q_BC: Tensor, temperature: float
) -> Tensor:
    """Return the sum over critics of the mean of T logsumexp((q - log density) / T) - q(recorded action).

    Args:
        sampled_q_BCN: Each critic's values of the sampled actions.
        log_densities_BN: Log-densities from which the actions were sampled; they correct for importance.
        q_BC: Each critic's values of the recorded actions.
        temperature: T, > 0.
    """
    corrected_BCN = sampled_q_BCN - log_densities_BN[:, None]
    soft_maxima_BC = temperature * (corrected_BCN / temperature).logsumexp(-1)
    return (soft_maxima_BC - q_BC).mean(0).sum()


def cloning_loss(*, recorded_logp_B: Tensor, logp_B: Tensor, alpha: Tensor) -> Tensor:
    """Return the mean of α log π(ã) - log π(a), the policy's loss in the first minibatches.

    Args:
        recorded_logp_B: Log-probabilities of the recorded actions a.
        logp_B: Log-probabilities of actions ã sampled from the policy.
        alpha: The temperature of the entropy.
    """
    return (alpha.detach() * logp_B - recorded_logp_B).mean()


class DefaultCQLModule(DefaultSACModule):
    """Policy and critics for Box actions. For `model_config`, see DefaultSACModule."""

    def setup(self) -> None:
        require_box(self, "CQL", "BC or MARWIL")
        super().setup()

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        # The environment clips actions further out, which other algorithms' policies may have recorded.
        return super()._forward_train({**batch, Columns.ACTIONS: batch[Columns.ACTIONS].clamp(-1.0, 1.0)})

    def values_of_sampled_actions(self, batch: dict[str, Any], num_actions: int) -> tuple[Tensor, Tensor]:
        """Return the critics' values of sampled actions at ``obs``, with gradients for the critics, and log-densities.

        Args:
            batch: The batch, with ``obs`` and ``new_obs`` of B rows.
            num_actions: Number of actions of each kind: uniform in (-1, 1), from the policy at ``obs``, and at
                ``new_obs``.

        Returns:
            float [B, C, 3 · num_actions] for C critics, and float [B, 3 · num_actions].
        """
        with torch.no_grad():
            logits, obs = self._logits(batch[Columns.OBS])
            next_logits, _ = self._logits(batch[Columns.NEXT_OBS])
            of_policy = [self._sample(of, num_actions) for of in (logits, next_logits)]
            uniform = 2.0 * torch.rand_like(of_policy[0][0]) - 1.0
            actions = torch.cat([uniform, *(drawn for drawn, _ in of_policy)], 1)
            log_density = -math.log(2.0) * math.prod(uniform.shape[2:])
            logp = torch.cat(
                [torch.full(uniform.shape[:2], log_density).to(logits), *(logp for _, logp in of_policy)], 1
            )
        repeated = tree_map(lambda leaf: leaf.repeat_interleave(3 * num_actions, 0), obs)
        values = critic_values(self.qfs, (repeated, actions.flatten(0, 1)))
        return values.reshape(*logp.shape, -1).transpose(1, 2), logp

    def _sample(self, logits: Tensor, num_actions: int) -> tuple[Tensor, Tensor]:
        """Return actions of the policy, [B, num_actions, …], and their log-probabilities, [B, num_actions]."""
        dist: Any = self.get_train_action_dist_cls().from_logits(logits.repeat_interleave(num_actions, 0))
        actions, logp = dist.sample_and_logp()
        shape = len(logits), num_actions
        return actions.reshape(*shape, *actions.shape[1:]), logp.reshape(shape)


class CQLLearner(OfflineLearner, SACLearner):
    """Trains modules like `DefaultCQLModule` (arXiv:2006.04779) on single recorded steps."""

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the sum of SAC's losses and the weighted penalty; see `conservative_penalty`."""
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        settings = cast(CQLTrainingSettings, config)
        module: Any = self.module[module_id]
        sampled_q_BCN, log_densities_BN = module.values_of_sampled_actions(batch, settings.num_actions)
        penalty = conservative_penalty(
            sampled_q_BCN=sampled_q_BCN,
            log_densities_BN=log_densities_BN,
            q_BC=fwd_out["qf_preds"],
            temperature=settings.temperature,
        )
        self.log_stats(module_id, {"cql_loss": penalty, "is_cloning": float(self._is_cloning)})
        return loss + settings.min_q_weight * penalty

    def compute_critic_loss(
        self, module: Any, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any], alpha: Tensor
    ) -> CriticLoss:
        if cast(CQLTrainingSettings, config).deterministic_backup:
            alpha = torch.zeros_like(alpha)
        return super().compute_critic_loss(module, config, batch, fwd_out, alpha)

    def compute_policy_loss(
        self, module: Any, batch: dict[str, Any], fwd_out: dict[str, Any], alpha: Tensor
    ) -> Tensor:
        if not self._is_cloning:
            return super().compute_policy_loss(module, batch, fwd_out, alpha)
        dist = module.get_train_action_dist_cls().from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        return cloning_loss(
            recorded_logp_B=dist.logp(batch[Columns.ACTIONS]), logp_B=fwd_out["logp_resampled"], alpha=alpha
        )

    @property
    def _is_cloning(self) -> bool:
        return self.report.num_gradient_updates_lifetime < cast(CQLTrainingSettings, self.config).bc_iters
