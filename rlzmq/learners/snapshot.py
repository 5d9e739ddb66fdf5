"""UpdateSnapshot: undoes failed updates."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["UpdateSnapshot"]


class UpdateSnapshot:
    """Copies of weights, buffers and optimizer states, so that an update is applied completely or not at all.

    A learner takes a snapshot before each update. If a peer dies during the update, the survivors return to the weights
    that all of them had, and the update's data can be trained again; likewise if some of the data made the loss
    overflow. The next update reuses the memory of the copies.

    Forward passes change only buffers, which `take` copies. All others are copied by `complete`, which an update calls
    before its first optimizer step, if anything may undo that step.
    """

    def __init__(self) -> None:
        self._buffers = _Copies()
        self._others = _Copies()  # parameters, then tensors of optimizer states
        self._parameters: list[Tensor] = []
        self._changing: list[Optimizer] = []
        # Each with its state: parameters and their values.
        self._optimizers: list[tuple[Optimizer, list[tuple[Any, dict[str, Any]]]]] = []
        self.is_complete: bool = False

    def take(self, parameters: list[Tensor], buffers: list[Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Begin a snapshot, replacing the previous one: copy the buffers.

        Args:
            parameters: All parameters.
            buffers: All buffers.
            optimizers: The optimizers of those parameters.
        """
        self._parameters, self._changing, self.is_complete = parameters, list(optimizers), False
        self._buffers.take(buffers)

    def complete(self) -> None:
        """Copy the parameters and the optimizers' states; call it before they change."""
        self.is_complete = True
        saved = list(self._parameters)
        self._optimizers = []
        for optimizer in self._changing:
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
        self._others.take(saved)

    def restore(self) -> None:
        """Restore all values in place; those of an incomplete snapshot have not changed, except buffers."""
        self._buffers.restore()
        if not self.is_complete:
            return
        self._others.restore()
        for optimizer, state in self._optimizers:
            optimizer.state.clear()
            for parameter, values in state:
                optimizer.state[parameter] = {
                    key: value if isinstance(value, Tensor) else copy.copy(value)
                    for key, value in values.items()
                }

    def restore_not_finite(self) -> None:
        """Restore the buffers that have become NaN or infinite, e.g. a BatchNorm's statistics."""
        if not self._buffers.tensors:
            return
        with torch.no_grad():
            for tensor, saved in zip(self._buffers.tensors, self._buffers.copies, strict=True):
                if not tensor.is_floating_point():
                    continue
                # One kernel: the sum is finite only if all elements are finite.
                if not math.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
                    tensor.copy_(saved)


class _Copies:
    """Tensors with copies of their values."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.copies: list[Tensor] = []
        self._addresses: list[int] = []  # of the tensors; they change with ``tensor.data = …``

    def take(self, tensors: list[Tensor]) -> None:
        if not tensors and not self.tensors:
            return
        with torch.no_grad():
            addresses = list(map(Tensor.data_ptr, tensors))
            if addresses == self._addresses and all(map(is_, tensors, self.tensors)):
                torch._foreach_copy_(self.copies, tensors)
            else:
                self.tensors, self._addresses = tensors, addresses
                self.copies = [tensor.detach().clone() for tensor in tensors]

    def restore(self, num: int | None = None) -> None:
        with torch.no_grad():
            for tensor, value in zip(self.tensors[:num], self.copies[:num], strict=True):
                tensor.copy_(value)
