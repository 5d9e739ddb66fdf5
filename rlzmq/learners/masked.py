"""Means over the unmasked entries of padded tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked_mean"]


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of `values` where `mask` is True (everywhere if None); 0 if it is True nowhere."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
