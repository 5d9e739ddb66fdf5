"""Gradient norms and clipping, between backward pass and optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["clip_gradients", "global_norm"]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients as one vector; a 0-d tensor, not finite if any element is not."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return norm


def clip_gradients(
    gradients: Sequence[Tensor],
    *,
    grad_clip: float | None,
    grad_clip_by: Literal["value", "norm", "global_norm"],
    norm: float,
) -> None:
    """Clip gradients in place, with a few kernels regardless of their number.

    Args:
        gradients: Gradients of one optimizer's parameters.
        grad_clip: The threshold; None: no clipping.
        grad_clip_by: The limited quantity: "value" every element, "norm" each tensor's 2-norm,
            "global_norm" the 2-norm of all gradients together.
        norm: The gradients' `global_norm`; finite.

    Raises:
        ValueError: `grad_clip_by` is not one of the three.
    """
    if grad_clip is None or not gradients:
        return
    gradients = list(gradients)
    if grad_clip_by == "global_norm":
        if norm > grad_clip:
            torch._foreach_mul_(gradients, grad_clip / norm)
    elif grad_clip_by == "value":
        torch._foreach_clamp_min_(gradients, -grad_clip)
        torch._foreach_clamp_max_(gradients, grad_clip)
    elif grad_clip_by == "norm":
        norms = torch._foreach_norm(gradients)
        scales = [(grad_clip / n.clamp(min=1e-12)).clamp(max=1.0) for n in norms]
        torch._foreach_mul_(gradients, scales)
    else:
        raise ValueError(f"grad_clip_by: expected 'value', 'norm' or 'global_norm', got {grad_clip_by!r}.")
