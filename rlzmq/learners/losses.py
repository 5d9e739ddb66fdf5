"""Parts of losses that several algorithms share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlzmq.core.errors import ConfigurationError

__all__ = [
    "ErrorLoss",
    "MaskedMean",
    "error_loss",
    "masked_mean",
    "no_loss",
]

ErrorLoss = Literal["mse", "huber"]
"""How a critic's error counts: squared, or half its square up to 1 and linearly beyond (Huber, δ = 1)."""


def error_loss(values: Tensor, targets: Tensor, kind: ErrorLoss) -> Tensor:
    """Return the loss of each element; checks of torch's functions would take longer than they do."""
    losses: Tensor
    if kind == "huber":
        losses = torch.ops.aten.huber_loss.default(values, targets, 0)
    else:
        losses = torch.ops.aten.mse_loss.default(values, targets, 0)
    return losses


class MaskedMean:
    """Means of several tensors over the same entries.

    Args:
        mask: The entries that count; None: all.
    """

    def __init__(self, mask: Tensor | None) -> None:
        # Masking without a masked entry is common and would cost a tenth of a small recurrent network's update, so
        # check for it. On a GPU, the check would wait for the GPU; in a compiled step, it would split the graph.
        is_read = mask is not None and mask.device.type == "cpu" and not torch.compiler.is_compiling()
        self._mask = None if mask is None or (is_read and bool(mask.all())) else mask
        self._share = None if self._mask is None else self._mask.sum().clamp(min=1).reciprocal()

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mean of `values` where the mask is True; 0 if it is False everywhere."""
        if self._mask is None or self._share is None:
            return values.mean()
        return torch.where(self._mask, values, 0.0).sum() * self._share

    def gradient(self, derivatives: Tensor, factor: float = 1.0) -> Tensor:
        """Return the gradient of ``factor`` times the mean of values with these derivatives, which are overwritten."""
        if self._mask is None or self._share is None:
            return derivatives.mul_(factor / derivatives.numel())
        return torch.where(self._mask, derivatives, 0.0) * (self._share * factor)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of `values` where `mask` is True (everywhere if None); 0 if it is False everywhere."""
    return MaskedMean(mask)(values)


def no_loss(returned: object, owner: object, module_id: str) -> ConfigurationError:
    """Return the error for what a loss function of a user returned instead of a tensor with one number.

    Args:
        returned: The value.
        owner: The learner, or the module with its own loss.
        module_id: The module's id.
    """
    name = "compute_loss_for_module"
    if not hasattr(owner, name):
        name = "compute_self_supervised_loss"
    if returned is None:
        what = "None. Does it end with `return loss`?"
    elif isinstance(returned, Tensor):
        what = f"a tensor of shape {tuple(returned.shape)}. Take its mean: loss.mean()."
    else:
        what = (
            f"a {type(returned).__name__}. Keep it a tensor, without float(), .item() or .numpy(): gradients flow "
            "through it."
        )
    return ConfigurationError(
        f"{type(owner).__name__}.{name}() of module {module_id!r}: expected one number as a tensor, got {what}"
    )
