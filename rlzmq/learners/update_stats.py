"""UpdateStats: scalars measured during an update, kept as tensors and read once at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["UpdateStats"]


class UpdateStats:
    """Scalars logged per module and minibatch. Their means over the last epoch are the update's results.

    Reading a scalar tensor costs a device synchronization, so tensors are only collected here.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def log(self, module_id: str, values: Mapping[str, Tensor | float]) -> None:
        """Log one minibatch's values."""
        collected = self._values[module_id]
        for name, value in values.items():
            collected[name].append(value.detach() if isinstance(value, Tensor) else value)

    def means(self, num_last: int) -> dict[str, dict[str, float]]:
        """Return module id → name → mean over the last `num_last` logged values (or all, if fewer)."""
        return {
            module_id: {name: _mean(values[-num_last:]) for name, values in collected.items()}
            for module_id, collected in self._values.items()
        }

    def means_of(self, name: str, num_last: int) -> dict[str, float]:
        """Return module id → mean of the last `num_last` values of one scalar, for modules that logged it."""
        return {
            module_id: _mean(collected[name][-num_last:])
            for module_id, collected in self._values.items()
            if name in collected
        }

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()


def _mean(values: list[Any]) -> float:
    first = values[0]
    if isinstance(first, Tensor):
        if len(values) == 1 and not first.dim():
            return first.item()
        return float(torch.stack(values).double().mean())
    return float(sum(values) / len(values))
