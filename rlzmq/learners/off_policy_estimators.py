"""Estimates of a policy's return from episodes that another policy sampled (Precup et al. 2000, "Eligibility Traces for
Off-Policy Policy Evaluation").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["estimated_returns", "recorded_returns"]

Floats = NDArray[np.float64]

# Bound of a ratio's logarithm, so that no weight overflows.
_MAX_LOG_RATIO = 500.0


def recorded_returns(rewards_B: Floats, lengths_E: NDArray[np.int64], gamma: float) -> Floats:
    """Return each episode's discounted return Σ γ^t r_t, float64 [E].

    Args:
        rewards_B: Rewards of all episodes' steps, one episode after the other.
        lengths_E: Number of steps of each episode, >= 1.
        gamma: γ.
    """
    return np.add.reduceat(rewards_B * gamma ** _times(lengths_E), _starts(lengths_E))


def estimated_returns(
    log_ratios_B: Floats, rewards_B: Floats, lengths_E: NDArray[np.int64], gamma: float, *, per_decision: bool
) -> Floats:
    """Return each episode's estimate of the policy's discounted return, float64 [E]. Their mean has no bias.

    With ρ_t = π(a_t|s_t) / μ(a_t|s_t), importance sampling weights the whole return by the product of all ρ. Per
    decision (PDIS), each reward is weighted by the product of the ρ up to its step, which varies less.

    Args:
        log_ratios_B: log ρ of all episodes' steps.
        rewards_B, lengths_E, gamma: See `recorded_returns`.
        per_decision: Whether to estimate per decision.
    """
    starts_E = _starts(lengths_E)
    if not per_decision:
        totals_E = np.add.reduceat(log_ratios_B, starts_E)
        return np.exp(np.minimum(totals_E, _MAX_LOG_RATIO)) * recorded_returns(rewards_B, lengths_E, gamma)
    sums_B = log_ratios_B.cumsum()
    sums_B -= (sums_B[starts_E] - log_ratios_B[starts_E]).repeat(lengths_E)
    return recorded_returns(np.exp(np.minimum(sums_B, _MAX_LOG_RATIO)) * rewards_B, lengths_E, gamma)


def _starts(lengths_E: NDArray[np.int64]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = lengths_E.cumsum() - lengths_E
    return starts


def _times(lengths_E: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each step's index in its episode, int64 [B]."""
    times: NDArray[np.int64] = np.arange(lengths_E.sum()) - _starts(lengths_E).repeat(lengths_E)
    return times
