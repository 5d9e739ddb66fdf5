"""SAC's losses (arXiv:1812.05905, section 5).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rlzmq.learners.losses import ErrorLoss, error_loss

__all__ = ["CriticLoss", "actor_loss", "critic_loss", "critic_stats", "critic_targets", "temperature_loss"]


class CriticLoss(NamedTuple):
    """The loss of each critic, float [C], and the TD error of each row, float [B], without gradients."""

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
    losses_BC = error_loss(q_BC, targets_BC, kind)
    td_errors_B = (q_BC - targets_BC).abs().mean(-1).detach()
    return CriticLoss((weights_B[:, None] * losses_BC).mean(0), td_errors_B)


def critic_stats(losses_C: Tensor) -> dict[str, Tensor]:
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
