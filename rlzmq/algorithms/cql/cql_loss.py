"""CQL's losses that differ from SAC's (arXiv:2006.04779, equation 4 and appendix F).

Shape suffixes: ``B`` rows of a minibatch, ``C`` critics, ``N`` sampled actions.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["cloning_loss", "conservative_penalty"]


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
