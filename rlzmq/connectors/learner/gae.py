"""Generalised advantage estimation over many episode chunks at once (arXiv:1506.02438, eq. 16)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["compute_gae", "discounted_suffix_sums", "standardize"]

# Floor of the standard deviation that advantages are divided by: a batch of equal advantages gives zeros.
_STD_FLOOR = 1e-4


# Rewards may overflow: the learner notices that in the loss, and finds their steps.
@np.errstate(over="ignore", invalid="ignore")
def compute_gae(
    rewards_N: ArrayLike,
    values_N: ArrayLike,
    bootstrap_values_C: ArrayLike,
    lengths_C: ArrayLike,
    *,
    gamma: float,
    lambda_: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute advantages and value targets of C consecutive chunks in N rows.

    Computed in float64 without a Python loop over rows; a chunk's result does not depend, to the last bit, on
    the other chunks it is batched with.

    Args:
        rewards_N: Rewards, [N], chunk after chunk.
        values_N: Value predictions of the observations that were acted on, [N].
        bootstrap_values_C: Value of each chunk's final observation, [C]; 0 where the episode terminated
            there.
        lengths_C: Number of rows of each chunk, [C], each ≥ 0; their sum is N.
        gamma: Discount factor in [0, 1].
        lambda_: GAE's λ in [0, 1]: 0 is the one-step TD error, 1 the Monte-Carlo return minus the value.

    Returns:
        ``(advantages, value_targets)``, float32 [N] each; ``value_targets = advantages + values``.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    rewards = np.asarray(rewards_N, np.float64)
    values = np.asarray(values_N, np.float64)
    bootstrap = np.asarray(bootstrap_values_C, np.float64)
    lengths = np.asarray(lengths_C, np.int64)
    if rewards.ndim != 1 or rewards.shape != values.shape or int(lengths.sum()) != rewards.shape[0]:
        raise ValueError(
            f"compute_gae: expected rewards and values of shape ({int(lengths.sum())},) (the sum of "
            f"{lengths.shape[0]} chunk lengths), got {rewards.shape} and {values.shape}."
        )
    if bootstrap.shape != lengths.shape:
        raise ValueError(
            f"compute_gae: expected {lengths.shape[0]} bootstrap values, got shape {bootstrap.shape}."
        )
    ends = np.cumsum(lengths)[lengths > 0] - 1
    next_values = np.empty_like(values)
    next_values[:-1] = values[1:]
    next_values[ends] = bootstrap[lengths > 0]
    deltas = rewards + gamma * next_values - values
    advantages = discounted_suffix_sums(deltas, ends, gamma * lambda_)
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")
def discounted_suffix_sums(
    terms_N: NDArray[np.float64], ends: NDArray[Any], discount: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute ``y[t] = terms[t] + discount[t] * y[t + 1]`` within each chunk, for all chunks at once.

    Pass k extends every row's sum from 2^k to 2^(k+1) terms, so the longest chunk's length L costs log2(L)
    vectorised passes instead of L Python steps.

    Args:
        terms_N: What is summed, [N].
        ends: Index of each chunk's last row, rising; the last one is N - 1.
        discount: In [0, 1]; one number, or one for each row, [N].
    """
    sums = terms_N.copy()
    if sums.size == 0:
        return sums
    # weight[t]: what a sum that starts at t multiplies the sum right after it with; 0 once it reaches the
    # chunk's end
    weights = np.empty_like(sums)
    weights[:] = discount
    weights[ends] = 0.0
    longest = int(np.diff(ends, prepend=-1).max())
    reach = 1
    while reach < longest and weights.any():
        sums[:-reach] += weights[:-reach] * sums[reach:]
        weights[:-reach] *= weights[reach:]
        # rows this near to the batch's end are complete: their chunk ends within this distance
        weights[-reach:] = 0.0
        reach *= 2
    return sums


@np.errstate(over="ignore", invalid="ignore")
def standardize(advantages_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the advantages of one module's real rows, shifted to mean 0 and scaled to deviation 1 (floor 1e-4)."""
    if advantages_N.size == 0:
        return advantages_N
    wide = advantages_N.astype(np.float64)
    centred = wide - wide.mean()
    scaled: NDArray[np.float32] = (centred / max(_STD_FLOOR, float(wide.std()))).astype(np.float32)
    return scaled
