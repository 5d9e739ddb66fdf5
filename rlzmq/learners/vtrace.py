"""V-trace: off-policy corrected value targets and advantages (arXiv:1802.01561, section 4.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["VTrace", "compute_vtrace"]


class VTrace(NamedTuple):
    """What `compute_vtrace` returns; float tensors of shape [T, B], without gradient."""

    value_targets_TB: Tensor
    """``v_s``: what the value function is regressed to."""
    advantages_TB: Tensor
    """``rho_s * (r_s + gamma_s * v_{s+1} - V(x_s))``: what multiplies the policy gradient."""


@torch.no_grad()
def compute_vtrace(
    *,
    behaviour_logp_TB: Tensor,
    target_logp_TB: Tensor,
    rewards_TB: Tensor,
    values_TB: Tensor,
    bootstrap_values_B: Tensor,
    discounts_TB: Tensor,
    lambda_: float = 1.0,
    clip_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
) -> VTrace:
    """V-trace over B trajectories of T steps.

    A trajectory may hold several episodes: a discount of 0 at an episode's last step cuts the recursion
    there. For a truncated (not terminated) step inside a trajectory, put the bootstrap value into its reward:
    ``reward + gamma * V(final observation)``.

    Args:
        behaviour_logp_TB: log μ(a|x) of the policy that sampled, [T, B].
        target_logp_TB: log π(a|x) of the policy that is trained, [T, B].
        rewards_TB: [T, B].
        values_TB: V(x) under the trained value function, [T, B].
        bootstrap_values_B: V of the observation after each trajectory's last step, [B].
        discounts_TB: γ, or 0 where the episode ended with this step, [T, B].
        lambda_: The trace's decay in [0, 1].
        clip_rho_threshold: ρ̄, bound of the importance ratio in the TD errors; None: no bound.
        clip_c_threshold: c̄, bound of the trace coefficients; None: no bound.
        clip_pg_rho_threshold: Bound of the ratio that multiplies the advantage; None: no bound.

    Returns:
        Value targets and advantages.

    Raises:
        ValueError: The shapes differ.
    """
    shape = rewards_TB.shape
    for name, tensor in (
        ("behaviour_logp_TB", behaviour_logp_TB),
        ("target_logp_TB", target_logp_TB),
        ("values_TB", values_TB),
        ("discounts_TB", discounts_TB),
    ):
        if tensor.shape != shape:
            raise ValueError(
                f"compute_vtrace: expected {name} of shape {tuple(shape)}, got {tuple(tensor.shape)}."
            )
    if bootstrap_values_B.shape != shape[1:]:
        raise ValueError(
            "compute_vtrace: expected bootstrap_values_B of shape "
            f"{tuple(shape[1:])}, got {tuple(bootstrap_values_B.shape)}."
        )
    ratios = torch.exp(target_logp_TB - behaviour_logp_TB)
    rhos = _clip(ratios, clip_rho_threshold)
    coefficients = lambda_ * _clip(ratios, clip_c_threshold)
    next_values = torch.cat([values_TB[1:], bootstrap_values_B[None]])
    deltas = rhos * (rewards_TB + discounts_TB * next_values - values_TB)

    # corrections[t] = v_t - V(x_t) = delta_t + gamma_t * c_t * corrections[t + 1]; T vectorised steps over B
    decays = discounts_TB * coefficients
    corrections = torch.empty_like(deltas)
    correction = torch.zeros_like(bootstrap_values_B)
    for t in range(shape[0] - 1, -1, -1):
        correction = torch.addcmul(deltas[t], decays[t], correction, out=corrections[t])
    targets = values_TB + corrections
    next_targets = torch.cat([targets[1:], bootstrap_values_B[None]])
    advantages = _clip(ratios, clip_pg_rho_threshold) * (rewards_TB + discounts_TB * next_targets - values_TB)
    return VTrace(targets, advantages)


def _clip(ratios: Tensor, threshold: float | None) -> Tensor:
    return ratios if threshold is None else ratios.clamp(max=threshold)
