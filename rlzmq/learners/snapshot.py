"""UpdateSnapshot: undoes failed updates."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["UpdateSnapshot"]


class UpdateSnapshot:
    """Copies of weights, buffers and optimizer states, so that an update is applied completely or not at all.

    A learner takes a snapshot before each update. If a peer dies during the update, the survivors return to the weights
    that all of them had, and the update's data can be trained again; likewise if some of the data made the loss
    overflow. The next update reuses the memory of the copies.
    """

    def __init__(self) -> None:
        self._saved: list[Tensor] = []  # weights and buffers, then tensors of optimizer states
        self._copies: list[Tensor] = []
        self._addresses: list[int] = []  # of the saved tensors; they change with ``tensor.data = …``
        self._buffers: list[tuple[Tensor, Tensor]] = []  # those of floats, with their copies
        self._num_weights = 0
        # Each with its state: parameters and their values.
        self._optimizers: list[tuple[Optimizer, list[tuple[Any, dict[str, Any]]]]] = []

    def take(self, tensors: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Copy all values, replacing the previous copies.

        Args:
            tensors: Parameters and buffers.
            optimizers: The optimizers of those parameters.
        """
        saved = list(tensors)
        self._num_weights = len(saved)
        self._optimizers = []
        for optimizer in optimizers:
            state: list[tuple[Any, dict[str, Any]]] = []
            for parameter, values in optimizer.state.items():
                kept = dict(values)
                state.append((parameter, kept))
                for key, value in values.items():
                    if type(value) is Tensor or isinstance(value, Tensor):
                        saved.append(value)
                    else:
                        kept[key] = copy.copy(value)
            self._optimizers.append((optimizer, state))
        with torch.no_grad():
            addresses = list(map(Tensor.data_ptr, saved))
            if addresses == self._addresses and all(map(is_, saved, self._saved)):
                if saved:  # the function does not accept empty lists
                    torch._foreach_copy_(self._copies, saved)
            else:
                self._saved, self._addresses = saved, addresses
                self._copies = [tensor.detach().clone() for tensor in saved]
                self._buffers = [
                    pair
                    for pair in zip(self._weights, self._copies, strict=False)
                    if not isinstance(pair[0], nn.Parameter) and pair[0].is_floating_point()
                ]

    def restore(self) -> None:
        """Restore all values in place."""
        self._copy(self._saved, self._copies)
        for optimizer, state in self._optimizers:
            optimizer.state.clear()
            for parameter, values in state:
                optimizer.state[parameter] = {
                    key: value if isinstance(value, Tensor) else copy.copy(value)
                    for key, value in values.items()
                }

    def restore_not_finite(self) -> None:
        """Restore the buffers that have become NaN or infinite, e.g. a BatchNorm's statistics."""
        with torch.no_grad():
            for tensor, saved in self._buffers:
                # One kernel: the sum is finite only if all elements are finite.
                if not math.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
                    tensor.copy_(saved)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the saved weights and buffers in the block."""
        weights = self._weights
        with torch.no_grad():
            newer = [tensor.detach().clone() for tensor in weights]
        self._copy(weights, self._copies[: self._num_weights])
        try:
            yield
        finally:
            self._copy(weights, newer)

    @property
    def _weights(self) -> list[Tensor]:
        return self._saved[: self._num_weights]

    def _copy(self, tensors: list[Tensor], values: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
