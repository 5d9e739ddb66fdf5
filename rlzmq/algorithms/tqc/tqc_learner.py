"""TQCLearner: SAC's learner with quantile critics."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from rlzmq.algorithms.sac.sac_learner import SACLearner
from rlzmq.algorithms.sac.sac_loss import CriticLoss
from rlzmq.algorithms.tqc.tqc_config import TQCTrainingSettings
from rlzmq.algorithms.tqc.tqc_loss import quantile_critic_loss, quantile_targets
from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.replay_learner import importance_weights
from rlzmq.learners.target_network_learner import discounts, target_outputs

__all__ = ["TQCLearner"]


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
