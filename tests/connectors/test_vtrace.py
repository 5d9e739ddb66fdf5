"""V-trace equals the recursion of the paper, written as a loop."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.connectors.learner.vtrace import compute_vtrace


def vtrace_by_loop(
    behavior: np.ndarray, target: np.ndarray, rewards: np.ndarray, values: np.ndarray, bootstrap: float,
    gamma: float, rho_bar: float, c_bar: float, pg_bar: float,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    targets, advantages = np.zeros_like(rewards), np.zeros_like(rewards)
    following_target, following_value = bootstrap, bootstrap
    for t in range(len(rewards) - 1, -1, -1):
        ratio = np.exp(target[t] - behavior[t])
        delta = min(rho_bar, ratio) * (rewards[t] + gamma * following_value - values[t])
        advantages[t] = min(pg_bar, ratio) * (rewards[t] + gamma * following_target - values[t])
        correction = gamma * min(c_bar, ratio) * (following_target - following_value)
        targets[t] = values[t] + delta + correction
        following_target, following_value = targets[t], values[t]
    return advantages, targets


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    bars=st.sampled_from([(1.0, 1.0, 1.0), (1.0, 0.8, 1.2), (None, 0.5, None)]),
    seed=st.integers(0, 1000),
)
def test_vtrace_equals_the_loop(lengths: list[int], bars: tuple[Any, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    behavior, target, rewards, values = rng.normal(size=(4, sum(lengths)))
    bootstrap = rng.normal(size=len(lengths)) * rng.integers(0, 2, len(lengths))
    rho_bar, c_bar, pg_bar = bars
    advantages, targets = compute_vtrace(
        behavior_logp_N=behavior,
        target_logp_N=target,
        rewards_N=rewards,
        values_N=values,
        bootstrap_values_C=bootstrap,
        lengths_C=lengths,
        gamma=0.9,
        clip_rho_threshold=rho_bar,
        clip_c_threshold=c_bar,
        clip_pg_rho_threshold=pg_bar,
    )
    bounds = np.cumsum([0, *lengths])
    for i, (first, last) in enumerate(itertools.pairwise(bounds)):
        of_chunk = (part[first:last] for part in (behavior, target, rewards, values))
        bar_values = (np.inf if bar is None else bar for bar in bars)
        expected = vtrace_by_loop(*of_chunk, bootstrap[i], 0.9, *bar_values)  # type: ignore[misc]
        np.testing.assert_allclose(advantages[first:last], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(targets[first:last], expected[1], rtol=1e-5, atol=1e-6)


def on_policy(bootstrap: float, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
    arguments: dict[str, Any] = {
        "behavior_logp_N": np.zeros(4),
        "target_logp_N": np.zeros(4),
        "rewards_N": np.ones(4),
        "values_N": np.full(4, 10.0),
        "bootstrap_values_C": [bootstrap],
        "lengths_C": [4],
        "gamma": 0.9,
    }
    return compute_vtrace(**arguments | kwargs)


def test_a_truncated_chunk_bootstraps_and_a_terminated_one_does_not() -> None:
    advantages, targets = on_policy(10.0)
    np.testing.assert_allclose(targets, [10.0, 10.0, 10.0, 10.0], rtol=1e-6)
    np.testing.assert_allclose(advantages, np.zeros(4), atol=1e-6)
    _, targets = on_policy(0.0)
    np.testing.assert_allclose(targets, [3.439, 2.71, 1.9, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"bootstrap_values_C": [0.0, 0.0]}, "expected 1 chunks"),
        ({"lengths_C": [4, 0], "bootstrap_values_C": [0.0, 0.0]}, "1 row or more"),
    ],
)
def test_shapes_that_differ_are_refused_by_name(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        on_policy(0.0, **wrong)
