"""IQLLearner: critics, value function and policy on recorded actions, each with its optimizer."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from rlzmq.algorithms.iql.iql_config import IQLConfig, IQLTrainingSettings
from rlzmq.algorithms.iql.iql_loss import critic_loss, expectile_loss, extraction_loss
from rlzmq.algorithms.sac.sac_loss import critic_stats
from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.offline_learner import OfflineLearner
from rlzmq.learners.target_network_learner import TargetNetworkLearner, discounts, target_outputs

__all__ = ["IQLLearner"]


class IQLLearner(OfflineLearner, TargetNetworkLearner):
    """Trains modules like `DefaultIQLModule` (arXiv:2110.06169) on single recorded steps.

    One backward pass of the losses' sum serves all optimizers, since the losses' gradients reach disjoint parameters.
    """

    config: IQLConfig

    def configure_optimizers_for_module(self, module_id: str, config: BaseConfig) -> None:
        """Register the optimizers "qf", "policy" and "value"."""
        settings = cast(IQLTrainingSettings, config)
        module: Any = self.module[module_id].unwrapped()
        self.register_adam_optimizers(
            module_id,
            {
                "qf": (list(module.qfs.parameters()), settings.critic_lr),
                "policy": (None, settings.actor_lr),
                "value": (list(module.vf.parameters()), settings.value_lr),
            },
        )

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the sum of the losses of critics, value function and policy; see `iql_loss`."""
        settings = cast(IQLTrainingSettings, config)
        module: Any = self.module[module_id].unwrapped()
        q_BC, values_B = (module.require_output(fwd_out, name) for name in ("qf_preds", "vf_preds"))
        logits = module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS)
        target = target_outputs(module, batch)
        advantages_B = target["qf_target_preds"] - values_B
        dist = module.get_train_action_dist_cls().from_logits(logits)
        value_loss = expectile_loss(advantages_B, settings.expectile)
        policy_loss = extraction_loss(
            logp_B=dist.logp(batch[Columns.ACTIONS]), advantages_B=advantages_B, beta=settings.beta
        )
        qf_losses_C = critic_loss(
            q_BC=q_BC,
            next_values_B=target["vf_preds_next"],
            rewards_B=batch[Columns.REWARDS].float(),
            discounts_B=discounts(batch, config.gamma),
        )
        stats = {
            **critic_stats(qf_losses_C),
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "qf_mean": q_BC.detach().mean(),
            "vf_mean": values_B.detach().mean(),
            "advantage_mean": advantages_B.detach().mean(),
        }
        self.log_stats(module_id, stats)
        loss: Tensor = qf_losses_C.sum() + value_loss + policy_loss
        return loss
