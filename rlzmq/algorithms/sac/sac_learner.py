"""SACLearner: critics, policy and temperature, each with its optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from rlzmq.algorithms.sac.sac_config import SACConfig, SACTrainingSettings
from rlzmq.algorithms.sac.sac_loss import (
    CriticLoss,
    actor_loss,
    critic_loss,
    critic_stats,
    critic_targets,
    temperature_loss,
)
from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.replay_learner import ReplayLearner, importance_weights
from rlzmq.learners.target_network_learner import discounts, target_outputs
from rlzmq.learners.update_counts import Scalar

__all__ = ["SACLearner"]

# Fraction of the uniform policy's entropy that policies for Discrete actions keep (arXiv:1910.07207).
_DISCRETE_ENTROPY = 0.98


class SACLearner(ReplayLearner):
    """Trains modules like `DefaultSACModule` (arXiv:1812.05905; for Discrete actions arXiv:1910.07207).

    One backward pass of the losses' sum serves all optimizers, since the losses' gradients reach disjoint parameters.
    """

    config: SACConfig

    def configure_optimizers_for_module(self, module_id: str, config: BaseConfig) -> None:
        """Register the optimizers "qf", "policy" and "alpha"."""
        settings = cast(SACTrainingSettings, config)
        module: Any = self.module[module_id].unwrapped()
        self.register_adam_optimizers(
            module_id,
            {
                "qf": (list(module.qfs.parameters()), settings.critic_lr),
                "policy": (None, settings.actor_lr),
                "alpha": ([module.log_alpha], settings.alpha_lr),
            },
        )

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the sum of the losses of critics, policy and temperature; see `sac_loss`."""
        module: Any = self.module[module_id].unwrapped()
        q_BC, logp_B = (module.require_output(fwd_out, name) for name in ("qf_preds", "logp_resampled"))
        alpha = module.log_alpha.detach().exp()
        critics = self.compute_critic_loss(module, config, batch, fwd_out, alpha)
        policy_loss = self.compute_policy_loss(module, batch, fwd_out, alpha)
        target_entropy = _target_entropy(cast(SACTrainingSettings, config), module.action_space)
        alpha_loss = temperature_loss(
            log_alpha=module.log_alpha, logp_B=logp_B, target_entropy=target_entropy
        )
        self.note_td_errors(module_id, batch, critics.td_errors_B)
        values_BC = q_BC.detach()
        stats: Mapping[str, Scalar] = {
            **critic_stats(critics.losses_C),
            "policy_loss": policy_loss,
            "alpha_loss": alpha_loss,
            "alpha_value": alpha,
            "log_alpha_value": module.log_alpha,
            "target_entropy": target_entropy,
            "logps_mean": logp_B.detach().mean,
            "qf_mean": values_BC.mean,
            "qf_max": values_BC.max,
            "qf_min": values_BC.min,
            "td_error_mean": critics.td_errors_B.mean,
        }
        self.log_stats(module_id, stats)
        loss: Tensor = critics.losses_C.sum() + policy_loss + alpha_loss
        return loss

    def compute_critic_loss(
        self, module: Any, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any], alpha: Tensor
    ) -> CriticLoss:
        """Return the critics' losses and the rows' TD errors; TQC and CQL override it."""
        target = target_outputs(module, {Columns.OBS: batch[Columns.NEXT_OBS]})
        targets_B = critic_targets(
            next_q_B=target["q_target_next"],
            next_logp_B=target["logp_next_resampled"],
            rewards_B=batch[Columns.REWARDS].float(),
            discounts_B=discounts(batch, config.gamma),
            alpha=alpha,
        )
        return critic_loss(
            q_BC=fwd_out["qf_preds"],
            targets_B=targets_B,
            weights_B=importance_weights(batch),
            kind=cast(SACTrainingSettings, config).td_error_loss_fn,
        )

    def compute_policy_loss(
        self, module: Any, batch: dict[str, Any], fwd_out: dict[str, Any], alpha: Tensor
    ) -> Tensor:
        """Return the policy's loss; CQL overrides it."""
        q_B, logp_B = (module.require_output(fwd_out, name) for name in ("q_curr", "logp_resampled"))
        return actor_loss(q_B=q_B, logp_B=logp_B, alpha=alpha)


def _target_entropy(settings: SACTrainingSettings, action_space: Any) -> float:
    if isinstance(settings.target_entropy, int | float):
        return float(settings.target_entropy)
    if hasattr(action_space, "n"):
        return _DISCRETE_ENTROPY * math.log(int(action_space.n))
    return -float(math.prod(action_space.shape))
