"""APPO's policy loss: the clipped surrogate against a target network (arXiv:1912.00167, section 3).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful
ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlzmq.learners.losses import masked_mean

__all__ = ["APPOPolicyTerms", "appo_policy_terms"]

# Bound of μ / π̄, the ratio of the sampling policy to the target network's policy.
_MAX_BEHAVIOR_RATIO = 2.0


class APPOPolicyTerms(NamedTuple):
    """0-d tensors: the loss, and the mean and variance of the clipped ratio of sampling and target policy."""

    policy_loss: Tensor
    mean_is: Tensor
    var_is: Tensor


def appo_policy_terms(
    *,
    logp_B: Tensor,
    target_logp_B: Tensor,
    behavior_logp_B: Tensor,
    advantages_B: Tensor,
    clip_param: float,
    mask_B: Tensor | None = None,
) -> APPOPolicyTerms:
    """Return the clipped surrogate with the ratio min(μ/π̄, 2) · π/μ.

    Args:
        logp_B: Log-probability of the actions under the trained policy π.
        target_logp_B: Log-probability under the target network's policy π̄.
        behavior_logp_B: Log-probability under the policy μ that sampled them.
        advantages_B: V-trace advantages.
        clip_param: The surrogate's clip range around 1.
        mask_B: Whether entries are real; None: all.
    """
    is_B = torch.exp(behavior_logp_B - target_logp_B).clamp(0.0, _MAX_BEHAVIOR_RATIO)
    ratio_B = is_B * torch.exp(logp_B - behavior_logp_B)
    clipped_B = ratio_B.clamp(1.0 - clip_param, 1.0 + clip_param)
    surrogate_B = torch.minimum(ratio_B * advantages_B, clipped_B * advantages_B)
    mean_is = masked_mean(is_B, mask_B)
    return APPOPolicyTerms(
        policy_loss=-masked_mean(surrogate_B, mask_B),
        mean_is=mean_is,
        var_is=masked_mean((is_B - mean_is).square(), mask_B),
    )
