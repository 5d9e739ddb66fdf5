"""PPO's loss: clipped surrogate, clipped value error, entropy bonus, KL penalty (arXiv:1707.06347).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful
ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlzmq.learners.masked import MaskedMean, masked_mean

__all__ = ["PPOLossTerms", "ppo_policy_terms", "ppo_value_loss"]


class PPOLossTerms(NamedTuple):
    """Means over the real rows of a minibatch, 0-d tensors."""

    policy_loss: Tensor
    entropy: Tensor
    mean_kl: Tensor | None


def ppo_policy_terms(
    *,
    logp_B: Tensor,
    old_logp_B: Tensor,
    advantages_B: Tensor,
    entropy_B: Tensor,
    kl_B: Tensor | None,
    clip_param: float,
    mask_B: Tensor | None = None,
) -> PPOLossTerms:
    """Return the policy terms of the loss.

    Args:
        logp_B: Log-probability of the actions under the trained policy.
        old_logp_B: Log-probability under the policy that sampled them.
        advantages_B: Advantages, standardized.
        entropy_B: Entropy of the trained policy.
        kl_B: KL divergence from the sampling policy to the trained one; None: no such term.
        clip_param: The surrogate's clip range around a probability ratio of 1.
        mask_B: Whether entries are real; None: all.
    """
    ratio_B = torch.exp(logp_B - old_logp_B)
    clipped_B = ratio_B.clamp(1.0 - clip_param, 1.0 + clip_param)
    surrogate_B = torch.minimum(advantages_B * ratio_B, advantages_B * clipped_B)
    mean = MaskedMean(mask_B)
    return PPOLossTerms(
        policy_loss=-mean(surrogate_B),
        entropy=mean(entropy_B),
        mean_kl=None if kl_B is None else mean(kl_B),
    )


def ppo_value_loss(
    values_B: Tensor, value_targets_B: Tensor, vf_clip_param: float | None, mask_B: Tensor | None = None
) -> Tensor:
    """Return the mean squared value error, with each row's error bounded by `vf_clip_param`; a 0-d tensor."""
    error_B = (values_B - value_targets_B).square()
    if vf_clip_param is not None:
        error_B = error_B.clamp(max=vf_clip_param)
    return masked_mean(error_B, mask_B)
