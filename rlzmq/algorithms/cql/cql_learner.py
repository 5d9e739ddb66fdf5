"""CQLLearner: SAC's learner on recorded steps, with conservative critics."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rlzmq.algorithms.cql.cql_config import CQLTrainingSettings
from rlzmq.algorithms.cql.cql_loss import cloning_loss, conservative_penalty
from rlzmq.algorithms.sac.sac_learner import SACLearner
from rlzmq.algorithms.sac.sac_loss import CriticLoss, critic_loss, critic_targets
from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.offline_learner import OfflineLearner
from rlzmq.learners.target_network_learner import discounts, target_outputs

__all__ = ["CQLLearner"]


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
        module: Any = self.module[module_id].unwrapped()
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
        target = target_outputs(module, {Columns.OBS: batch[Columns.NEXT_OBS]})
        settings = cast(CQLTrainingSettings, config)
        targets_B = critic_targets(
            next_q_B=target["q_target_next"],
            next_logp_B=target["logp_next_resampled"],
            rewards_B=batch[Columns.REWARDS].float(),
            discounts_B=discounts(batch, config.gamma),
            alpha=torch.zeros_like(alpha) if settings.deterministic_backup else alpha,
        )
        return critic_loss(
            q_BC=fwd_out["qf_preds"],
            targets_B=targets_B,
            weights_B=torch.ones_like(targets_B),
            kind=settings.td_error_loss_fn,
        )

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
        return self.num_gradient_updates_lifetime < cast(CQLTrainingSettings, self.config).bc_iters
