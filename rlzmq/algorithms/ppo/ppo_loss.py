"""PPO's loss: clipped surrogate, clipped value error, entropy bonus, KL penalty (arXiv:1707.06347).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful
ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlzmq.learners.losses import MaskedMean

__all__ = ["PPOLossSettings", "PPOLossTerms", "ppo_loss"]


class PPOLossSettings(NamedTuple):
    """Constants of the loss; see `PPOTrainingSettings`."""

    clip_param: float
    vf_clip_param: float | None
    vf_loss_coeff: float
    entropy_coeff: float
    kl_coeff: float
    vf_clip_change: float | None = None


class PPOLossTerms(NamedTuple):
    """0-d tensors: the loss, and without gradients its terms, which are means over the real rows of a minibatch."""

    loss: Tensor
    policy_loss: Tensor
    vf_loss: Tensor | None
    entropy: Tensor | None
    mean_kl: Tensor | None


def ppo_loss(
    *,
    logp_B: Tensor,
    old_logp_B: Tensor,
    advantages_B: Tensor,
    values_B: Tensor | None,
    value_targets_B: Tensor | None,
    entropy_B: Tensor | None,
    kl_B: Tensor | None,
    settings: PPOLossSettings,
    mask_B: Tensor | None = None,
    old_values_B: Tensor | None = None,
) -> PPOLossTerms:
    """Return policy loss + value loss − entropy bonus + KL penalty, and its terms.

    The gradient of the loss is computed together with its value, which takes half as many operations as torch's
    differentiation of the formula.

    Args:
        logp_B: Log-probability of the actions under the trained policy.
        old_logp_B: Log-probability under the policy that sampled them.
        advantages_B: Advantages, standardized.
        values_B: Predictions of the trained value function; None: no critic.
        value_targets_B: Their targets; None: no critic.
        entropy_B: Entropy of the trained policy; None: no such term.
        kl_B: KL divergence from the sampling policy to the trained one; None: no such term.
        settings: Clip ranges and coefficients.
        mask_B: Whether entries are real; None: all.
        old_values_B: The value predictions before the update; needed with ``vf_clip_change``.

    Raises:
        RuntimeError: In the backward pass, if it is one with ``create_graph=True``.
    """
    terms: Any = _Loss.apply(  # type: ignore[no-untyped-call]
        logp_B,
        values_B,
        entropy_B,
        kl_B,
        (
            old_logp_B,
            advantages_B,
            value_targets_B,
            old_values_B,
        ),  # as one argument, since torch examines each
        MaskedMean(mask_B),
        settings,
    )
    return PPOLossTerms(*terms)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logp_B: Tensor,
        values_B: Tensor | None,
        entropy_B: Tensor | None,
        kl_B: Tensor | None,
        data: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        mean: MaskedMean,
        settings: PPOLossSettings,
    ) -> tuple[Tensor | None, ...]:
        old_logp_B, advantages_B, value_targets_B, old_values_B = data
        clip, vf_clip, vf_coeff, entropy_coeff, kl_coeff, vf_clip_change = settings
        ratio_B = torch.exp(logp_B - old_logp_B)
        unclipped_B = advantages_B * ratio_B
        clipped_B = advantages_B * ratio_B.clamp_(1.0 - clip, 1.0 + clip)
        policy_loss = loss = -mean(torch.minimum(unclipped_B, clipped_B))
        # The derivative of A·π/μ by log π is A·π/μ; that of the clipped surrogate is 0 where it is the smaller one.
        by_logp_B = mean.gradient(unclipped_B.masked_fill_(unclipped_B > clipped_B, 0.0), -1.0)
        vf_loss = by_values_B = entropy = by_entropy_B = mean_kl = by_kl_B = None
        if values_B is not None and value_targets_B is not None:
            error_B = values_B - value_targets_B
            square_B = error_B * error_B
            if vf_clip_change is not None:
                assert old_values_B is not None
                change_B = (values_B - old_values_B).clamp_(-vf_clip_change, vf_clip_change)
                bounded_B = (old_values_B + change_B - value_targets_B).square_()
                # Where the bounded value's error is larger, it does not depend on the value.
                error_B.masked_fill_(bounded_B > square_B, 0.0)
                square_B = torch.maximum(square_B, bounded_B)
            if vf_clip is not None:
                error_B.masked_fill_(square_B > vf_clip, 0.0)
                square_B.clamp_(max=vf_clip)
            vf_loss = mean(square_B)
            by_values_B = mean.gradient(error_B, 2.0 * vf_coeff)
            loss = torch.add(loss, vf_loss, alpha=vf_coeff)
        if entropy_B is not None:
            entropy = mean(entropy_B)
            if entropy_coeff:
                by_entropy_B = mean.gradient(torch.ones_like(entropy_B), -entropy_coeff)
                loss = loss - entropy * entropy_coeff
        if kl_B is not None:
            mean_kl = mean(kl_B)
            if kl_coeff:
                by_kl_B = mean.gradient(torch.ones_like(kl_B), kl_coeff)
                loss = loss + mean_kl * kl_coeff
        if loss is policy_loss:
            loss = loss.clone()
        ctx.save_for_backward(by_logp_B, by_values_B, by_entropy_B, by_kl_B)
        ctx.set_materialize_grads(False)
        terms = policy_loss, vf_loss, entropy, mean_kl
        ctx.mark_non_differentiable(*[term for term in terms if term is not None])
        return loss, *terms

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ppo_loss: expected one differentiation of the loss, got create_graph=True, which needs its second "
                "derivative. Compute a gradient penalty from the module's outputs, without PPO's loss."
            )
        gradients = [None if part is None else part * of_loss for part in ctx.saved_tensors]
        return *gradients, None, None, None
