"""IQL's losses (arXiv:2110.06169, section 4).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["critic_loss", "expectile_loss", "extraction_loss"]

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
