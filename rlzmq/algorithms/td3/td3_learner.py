"""TD3Learner: critics learn from every minibatch; policy and target networks every `policy_delay` minibatches."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rlzmq.algorithms.sac.sac_learner import critic_loss, critic_stats
from rlzmq.algorithms.td3 import TD3Config, TD3TrainingSettings
from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.replay_learner import ReplayLearner, importance_weights
from rlzmq.learners.target_network_learner import discounts, target_outputs

__all__ = ["TD3Learner"]


class TD3Learner(ReplayLearner):
    """Trains modules like `DefaultTD3Module` (arXiv:1802.09477).

    Shape suffixes: ``B`` rows of a minibatch, ``C`` critics.
    """

    config: TD3Config

    def configure_optimizers_for_module(self, module_id: str, config: BaseConfig) -> None:
        """Register the optimizers "qf" and "policy"; the latter is delayed."""
        settings = cast(TD3TrainingSettings, config)
        module: Any = self.module[module_id]
        self.register_adam_optimizers(
            module_id,
            {"qf": (list(module.qfs.parameters()), settings.critic_lr), "policy": (None, settings.actor_lr)},
            every={"policy": settings.policy_delay},
        )

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the sum of the critics' losses and, if the policy's optimizer steps, of the policy's."""
        settings = cast(TD3TrainingSettings, config)
        module: Any = self.module[module_id]
        q_BC = module.require_output(fwd_out, "qf_preds")
        clip = settings.target_noise_clip
        noise = (settings.target_noise * torch.randn_like(batch[Columns.ACTIONS])).clamp(-clip, clip)
        target = target_outputs(module, {Columns.OBS: batch[Columns.NEXT_OBS], "noise": noise})
        targets_B = batch[Columns.REWARDS].float() + discounts(batch, config.gamma) * target["q_target_next"]
        critics = critic_loss(
            q_BC=q_BC,
            targets_B=targets_B,
            weights_B=importance_weights(batch),
            kind=settings.td_error_loss_fn,
        )
        self.note_td_errors(module_id, batch, critics.td_errors_B)
        self.log_stats(module_id, critic_stats(critics, q_BC))
        loss: Tensor = critics.losses_C.sum()
        if not self.steps_optimizer(module_id, "policy"):
            return loss
        policy_loss: Tensor = -module.values_of_policy(batch).mean()
        self.log_stats(module_id, {"policy_loss": policy_loss})
        return loss + policy_loss

    def updates_targets(self) -> bool:
        return self.steps_optimizer(self.trained_module_ids[0], "policy")
