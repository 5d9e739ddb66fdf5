"""Parts of losses that several algorithms share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["ErrorLoss", "error_loss"]

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
