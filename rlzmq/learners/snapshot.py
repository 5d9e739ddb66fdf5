"""UpdateSnapshot: undoes failed updates."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["UpdateSnapshot"]


class UpdateSnapshot:
    """Copies of weights, buffers and optimizer state, so that an update happens whole or not at all.

    A learner takes one before each update. If a peer dies during the update, the survivors return to the weights that
    all of them had, and the update's data can be trained again; likewise if some of the data made the loss overflow.

    Args:
        tensors: Parameters and buffers.
        optimizers: The optimizers of those parameters.
    """

    def __init__(self, tensors: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        self._tensors = list(tensors)
        with torch.no_grad():
            self._copies = [tensor.detach().clone() for tensor in self._tensors]
        self._optimizers = [(optimizer, _copied(optimizer.state)) for optimizer in optimizers]

    def restore(self) -> None:
        """Restore all values in place."""
        self._copy(self._copies)
        for optimizer, state in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(_copied(state))

    def restore_not_finite(self) -> None:
        """Restore the buffers that became NaN or infinite, e.g. a BatchNorm's statistics."""
        with torch.no_grad():
            for tensor, saved in zip(self._tensors, self._copies, strict=True):
                is_buffer = not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                if is_buffer and not bool(torch.isfinite(tensor).all()):
                    tensor.copy_(saved)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the saved weights and buffers within the block."""
        with torch.no_grad():
            newer = [tensor.detach().clone() for tensor in self._tensors]
            self._copy(self._copies)
        try:
            yield
        finally:
            self._copy(newer)

    def _copy(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor.copy_(value)


def _copied(state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    return {
        parameter: {
            key: value.clone() if isinstance(value, Tensor) else copy.copy(value)
            for key, value in values.items()
        }
        for parameter, values in state.items()
    }
