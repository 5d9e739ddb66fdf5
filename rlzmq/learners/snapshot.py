"""What a failed update is undone with."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["UpdateSnapshot"]


class UpdateSnapshot:
    """Copies of weights, buffers and optimizer state, so that an update happens whole or not at all.

    A group of learners takes one before each update: when a peer dies in the middle of it, the survivors go
    back to the weights that all of them had, and the update's data can be trained again.

    Args:
        tensors: Parameters and buffers.
        optimizers: The optimizers of those parameters.
    """

    def __init__(self, tensors: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        self._tensors = list(tensors)
        with torch.no_grad():
            self._copies = [tensor.detach().clone() for tensor in self._tensors]
        self._optimizers = [(optimizer, _copy_state(optimizer)) for optimizer in optimizers]

    def restore(self) -> None:
        """Put everything back, in place."""
        with torch.no_grad():
            for tensor, saved in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(saved)
        for optimizer, state in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)


def _copy_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {
        parameter: {
            key: value.clone() if isinstance(value, Tensor) else copy.copy(value)
            for key, value in values.items()
        }
        for parameter, values in optimizer.state.items()
    }
