"""SACLearner: critics, policy and temperature, each with its optimizer (arXiv:1812.05905, section 5).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor

from rlzmq.algorithms.sac import SACConfig, SACTrainingSettings
from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.learner_report import Scalar
from rlzmq.learners.replay_learner import ReplayLearner, importance_weights
from rlzmq.learners.target_network_learner import ErrorLoss, discounts, error_loss, target_outputs

__all__ = [
    "CriticLoss",
    "SACLearner",
    "actor_loss",
    "critic_loss",
    "critic_stats",
    "critic_targets",
    "loss_stats",
    "temperature_loss",
]


class CriticLoss(NamedTuple):
    """The loss of each critic, float [C], and each row's TD error, float [B], without gradients."""

    losses_C: Tensor
    td_errors_B: Tensor


def critic_targets(
    *, next_q_B: Tensor, next_logp_B: Tensor, rewards_B: Tensor, discounts_B: Tensor, alpha: Tensor
) -> Tensor:
    """Return r + discount · (q' - α log π'), float [B], without gradients.

    Args:
        next_q_B: The smallest of the target critics' values of the policy's next actions.
        next_logp_B: Log-probabilities of these actions.
        rewards_B: Sums of n rewards.
        discounts_B: γ^n, or 0 after a terminal step.
        alpha: The temperature.
    """
    return (rewards_B + discounts_B * (next_q_B - alpha * next_logp_B)).detach()


def critic_loss(*, q_BC: Tensor, targets_B: Tensor, weights_B: Tensor, kind: ErrorLoss) -> CriticLoss:
    """Return each critic's weighted mean loss; TD errors are means over critics.

    Args:
        q_BC: Each critic's values of the actions taken.
        targets_B: See `critic_targets`.
        weights_B: Importance weights.
        kind: See `ErrorLoss`.
    """
    targets_BC = targets_B[:, None].expand_as(q_BC)
    losses_C = (weights_B[:, None] * error_loss(q_BC, targets_BC, kind)).mean(0)
    return CriticLoss(losses_C, (q_BC.detach() - targets_BC).abs().mean(-1))


def critic_stats(critics: CriticLoss, q_BC: Tensor) -> dict[str, Scalar]:
    """Return the critics' losses, values and errors for the results; the latter are computed if somebody reads them."""
    values_BC = q_BC.detach()
    return {
        **loss_stats(critics.losses_C),
        "qf_mean": values_BC.mean,
        "qf_max": values_BC.max,
        "qf_min": values_BC.min,
        "td_error_mean": critics.td_errors_B.mean,
    }


def loss_stats(losses_C: Tensor) -> dict[str, Scalar]:
    """Return the critics' losses for the results: ``qf_loss`` and, of two critics, ``qf_twin_loss``; else their sum."""
    if len(losses_C) != 2:
        return {"qf_loss": losses_C.detach().sum()}
    qf_loss, qf_twin_loss = losses_C.detach().unbind()
    return {"qf_loss": qf_loss, "qf_twin_loss": qf_twin_loss}


def actor_loss(*, q_B: Tensor, logp_B: Tensor, alpha: Tensor) -> Tensor:
    """Return the mean of α log π - q, for actions drawn from the policy with gradients through them."""
    return (alpha.detach() * logp_B - q_B).mean()


def temperature_loss(*, log_alpha: Tensor, logp_B: Tensor, target_entropy: float) -> Tensor:
    """Return the mean of -log α (log π + target entropy): α rises while the policy's entropy is below the target."""
    return -(log_alpha * (logp_B + target_entropy).detach()).mean()


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
        module: Any = self.module[module_id]
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
        """Return the sum of the losses of critics, policy and temperature."""
        module: Any = self.module[module_id]
        q_BC, logp_B = (module.require_output(fwd_out, name) for name in ("qf_preds", "logp_resampled"))
        alpha = module.log_alpha.detach().exp()
        critics = self.compute_critic_loss(module, config, batch, fwd_out, alpha)
        policy_loss = self.compute_policy_loss(module, batch, fwd_out, alpha)
        target_entropy = _target_entropy(cast(SACTrainingSettings, config), module.action_space)
        alpha_loss = temperature_loss(
            log_alpha=module.log_alpha, logp_B=logp_B, target_entropy=target_entropy
        )
        self.note_td_errors(module_id, batch, critics.td_errors_B)
        stats: Mapping[str, Scalar] = {
            **critic_stats(critics, q_BC),
            "policy_loss": policy_loss,
            "alpha_loss": alpha_loss,
            "alpha_value": alpha,
            "log_alpha_value": module.log_alpha,
            "target_entropy": target_entropy,
            "logps_mean": logp_B.detach().mean,
        }
        self.log_stats(module_id, stats)
        loss: Tensor = critics.losses_C.sum() + policy_loss + alpha_loss
        return loss

    def compute_critic_loss(
        self, module: Any, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any], alpha: Tensor
    ) -> CriticLoss:
        """Return the critics' losses and the rows' TD errors; TQC and CQL override it.

        A module may give ``q_target_next`` and ``logp_next_resampled`` in `fwd_out`; then it needs no target networks.
        """
        target = fwd_out
        if "q_target_next" not in fwd_out:
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
