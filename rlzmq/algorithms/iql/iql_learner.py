"""IQLLearner: critics, value function and policy on recorded actions, each with its optimizer (arXiv:2110.06169).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from rlzmq.algorithms.iql import IQLConfig, IQLTrainingSettings
from rlzmq.algorithms.sac.sac_learner import loss_stats
from rlzmq.algorithms.sac.sac_module import Critic, DefaultSACModule, critic_values, require_box
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.offline_learner import OfflineLearner
from rlzmq.learners.target_network_learner import TargetNetworkLearner, discounts, target_outputs

__all__ = [
    "DefaultIQLModule",
    "IQLLearner",
    "critic_loss",
    "expectile_loss",
    "extraction_loss",
]


_MAX_WEIGHT = 100.0


def expectile_loss(advantages_B: Tensor, expectile: float) -> Tensor:
    """Return the mean of |τ - 1{A ≤ 0}| A², the value function's loss (equation 5).

    Args:
        advantages_B: A, the smallest of the target critics' values of the recorded actions, minus V(s).
        expectile: τ in (0, 1).
    """
    weights_B = advantages_B.gt(0.0).to(advantages_B) * (2.0 * expectile - 1.0) + (1.0 - expectile)
    return (weights_B * advantages_B.square()).mean()


def extraction_loss(*, logp_B: Tensor, advantages_B: Tensor, beta: float) -> Tensor:
    """Return minus the mean of min(exp(beta A), 100) log π(a), the policy's loss (equation 7).

    Args:
        logp_B: Log-probabilities of the recorded actions under the trained policy.
        advantages_B: See `expectile_loss`; not differentiated.
        beta: Strength of the weighting: larger is greedier.
    """
    weights_B = (beta * advantages_B.detach()).exp().clamp(max=_MAX_WEIGHT)
    return -(weights_B * logp_B).mean()


def critic_loss(*, q_BC: Tensor, next_values_B: Tensor, rewards_B: Tensor, discounts_B: Tensor) -> Tensor:
    """Return each critic's mean squared error to r + discount · V(s'), divided by their number; float [C] (equation 6).

    Args:
        q_BC: Each critic's values of the recorded actions.
        next_values_B: V(s'), not differentiated.
        rewards_B: Rewards.
        discounts_B: γ, or 0 after a terminal step.
    """
    targets_B = (rewards_B + discounts_B * next_values_B).detach()
    return (q_BC - targets_B[:, None]).square().mean(0) / q_BC.shape[1]


class DefaultIQLModule(DefaultSACModule):
    """Policy, critics and value function for Box actions.

    `model_config`: fields of a DefaultModelConfig, and ``twin_q`` (see `IQLConfig`).

    Attributes:
        vf: The value function.
    """

    has_temperature: ClassVar[bool] = False

    def setup(self) -> None:
        require_box(self, "IQL", "BC or MARWIL")
        super().setup()
        if not self.inference_only:
            where = self.describe()
            model = {name: value for name, value in self.model_config.items() if name != "twin_q"}
            config = DefaultModelConfig.from_dict(model, where=f"model_config of the {where}")
            self.vf: Critic = Critic(self._obs_mask.space, 1, config, where)

    def get_non_inference_attributes(self) -> list[str]:
        return ["qfs", "target_qfs", "vf"]

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return ``qf_preds`` [B, C] of the batch's actions, ``vf_preds`` [B] and ``action_dist_inputs``."""
        logits, obs = self._logits(batch[Columns.OBS])
        return {
            Columns.ACTION_DIST_INPUTS: logits,
            "qf_preds": critic_values(self.qfs, (obs, _in_range(batch))).squeeze(-1),
            "vf_preds": self.vf(obs).squeeze(-1),
        }

    @torch.no_grad()
    def forward_target(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return ``qf_target_preds``, the smallest of the target critics' values, and ``vf_preds_next``, float [B]."""
        obs, next_obs = (self._obs_mask.split(batch[name])[0] for name in (Columns.OBS, Columns.NEXT_OBS))
        q_BC = critic_values(self.target_qfs, (obs, _in_range(batch))).squeeze(-1)
        return {"qf_target_preds": q_BC.amin(-1), "vf_preds_next": self.vf(next_obs).squeeze(-1)}


def _in_range(batch: dict[str, Any]) -> object:
    # The environment clips actions further out, which other algorithms' policies may have recorded.
    return batch[Columns.ACTIONS].clamp(-1.0, 1.0)


class IQLLearner(OfflineLearner, TargetNetworkLearner):
    """Trains modules like `DefaultIQLModule` (arXiv:2110.06169) on single recorded steps.

    One backward pass of the losses' sum serves all optimizers, since the losses' gradients reach disjoint parameters.
    """

    config: IQLConfig

    def configure_optimizers_for_module(self, module_id: str, config: BaseConfig) -> None:
        """Register the optimizers "qf", "policy" and "value"."""
        settings = cast(IQLTrainingSettings, config)
        module: Any = self.module[module_id]
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
        """Return the sum of the losses of critics, value function and policy."""
        settings = cast(IQLTrainingSettings, config)
        module: Any = self.module[module_id]
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
            **loss_stats(qf_losses_C),
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "qf_mean": q_BC.detach().mean(),
            "vf_mean": values_B.detach().mean(),
            "advantage_mean": advantages_B.detach().mean(),
        }
        self.log_stats(module_id, stats)
        loss: Tensor = qf_losses_C.sum() + value_loss + policy_loss
        return loss
