"""V-trace equals the recursion of the paper, written as a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.learners.vtrace import compute_vtrace


def vtrace_by_loop(
    behaviour: np.ndarray, target: np.ndarray, rewards: np.ndarray, values: np.ndarray, bootstrap: np.ndarray,
    discounts: np.ndarray, lambda_: float, rho_bar: float, c_bar: float, pg_bar: float,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    num_steps, num_trajectories = rewards.shape
    targets, advantages = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(num_trajectories):
        following_target, following_value = bootstrap[b], bootstrap[b]
        for t in range(num_steps - 1, -1, -1):
            ratio = np.exp(target[t, b] - behaviour[t, b])
            rho, c = min(rho_bar, ratio), lambda_ * min(c_bar, ratio)
            delta = rho * (rewards[t, b] + discounts[t, b] * following_value - values[t, b])
            advantages[t, b] = min(pg_bar, ratio) * (
                rewards[t, b] + discounts[t, b] * following_target - values[t, b]
            )
            targets[t, b] = values[t, b] + delta + discounts[t, b] * c * (following_target - following_value)
            following_target, following_value = targets[t, b], values[t, b]
    return targets, advantages


@settings(max_examples=40, deadline=None)
@given(
    num_steps=st.integers(0, 12),
    num_trajectories=st.integers(1, 4),
    lambda_=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_vtrace_equals_the_loop(num_steps: int, num_trajectories: int, lambda_: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    behaviour, target, rewards, values = rng.normal(size=(4, num_steps, num_trajectories))
    bootstrap = rng.normal(size=num_trajectories)
    discounts = 0.99 * rng.integers(0, 2, (num_steps, num_trajectories))
    got = compute_vtrace(
        behaviour_logp_TB=torch.tensor(behaviour),
        target_logp_TB=torch.tensor(target),
        rewards_TB=torch.tensor(rewards),
        values_TB=torch.tensor(values, requires_grad=True),
        bootstrap_values_B=torch.tensor(bootstrap),
        discounts_TB=torch.tensor(discounts),
        lambda_=lambda_,
        clip_rho_threshold=1.0,
        clip_c_threshold=0.8,
        clip_pg_rho_threshold=1.2,
    )
    targets, advantages = vtrace_by_loop(
        behaviour, target, rewards, values, bootstrap, discounts, lambda_, 1.0, 0.8, 1.2
    )
    np.testing.assert_allclose(got.value_targets_TB.numpy(), targets, atol=1e-10)
    np.testing.assert_allclose(got.advantages_TB.numpy(), advantages, atol=1e-10)
    assert not got.value_targets_TB.requires_grad


def test_on_policy_vtrace_is_the_discounted_return() -> None:
    zeros = torch.zeros(3, 1)
    got = compute_vtrace(
        behaviour_logp_TB=zeros,
        target_logp_TB=zeros,
        rewards_TB=torch.ones(3, 1),
        values_TB=zeros,
        bootstrap_values_B=torch.tensor([8.0]),
        discounts_TB=torch.full((3, 1), 0.5),
    )
    assert got.value_targets_TB.flatten().tolist() == [1 + 0.5 + 0.25 + 1, 1 + 0.5 + 2, 1 + 4]


def test_shapes_that_differ_are_refused_by_name() -> None:
    tensors = {
        name: torch.zeros(3, 2)
        for name in ("behaviour_logp_TB", "target_logp_TB", "rewards_TB", "values_TB", "discounts_TB")
    }
    with pytest.raises(ValueError, match="bootstrap_values_B"):
        compute_vtrace(**tensors, bootstrap_values_B=torch.zeros(3))
    with pytest.raises(ValueError, match="values_TB"):
        compute_vtrace(**{**tensors, "values_TB": torch.zeros(3)}, bootstrap_values_B=torch.zeros(2))
