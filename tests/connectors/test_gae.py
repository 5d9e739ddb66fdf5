"""GAE over ragged chunks equals the textbook loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlzmq.connectors.learner.advantages import compute_gae

Array = NDArray[np.float64]


def gae_by_loop(
    rewards: Array, values: Array, bootstrap: Array, lengths: list[int], gamma: float, lambda_: float
) -> Array:
    advantages = np.zeros_like(rewards)
    start = 0
    for chunk, length in enumerate(lengths):
        following_value, following_advantage = bootstrap[chunk], 0.0
        for t in range(start + length - 1, start - 1, -1):
            delta = rewards[t] + gamma * following_value - values[t]
            following_advantage = delta + gamma * lambda_ * following_advantage
            advantages[t] = following_advantage
            following_value = values[t]
        start += length
    return advantages


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lambda_=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_gae_equals_the_loop(lengths: list[int], gamma: float, lambda_: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = sum(lengths)
    rewards, values = rng.normal(size=num_rows), rng.normal(size=num_rows)
    bootstrap = rng.normal(size=len(lengths)) * rng.integers(0, 2, len(lengths))
    advantages, targets = compute_gae(rewards, values, bootstrap, lengths, gamma=gamma, lambda_=lambda_)
    expected = gae_by_loop(rewards, values, bootstrap, lengths, gamma, lambda_)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(targets, expected + values, rtol=1e-5, atol=1e-5)
    assert advantages.dtype == targets.dtype == np.float32


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*got \(2,\)"):
        compute_gae([1, 2], [1, 2], [0], [3], gamma=1.0, lambda_=1.0)
    with pytest.raises(ValueError, match="1 bootstrap values"):
        compute_gae([1, 2], [1, 2], [0, 0], [2], gamma=1.0, lambda_=1.0)
