"""What an update measures: the scalars that its losses log, its counts and times; and the results made of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlzmq.core.timers import LEARNER_STAGES
from rlzmq.learners.train_batch import TrainBatch

__all__ = ["Scalar", "UpdateCounts", "UpdateStats", "UpdateTimes", "mean_of"]

Scalar = Tensor | float | Callable[[], Tensor]


@dataclass
class UpdateCounts:
    """What an update has done so far.

    Attributes:
        batch: The counts of all batches that this rank trained, without their rows.
        num_batches: Number of these batches.
        num_minibatches: Number of minibatches.
        num_env_steps: Env steps, on all ranks.
        num_module_steps: Module id → timesteps, on all ranks.
        num_steps_due: Module id → number of its minibatches, on any rank.
        num_skipped: Module id → number of these without an optimizer step, as loss or gradients were not finite.
        minibatch_rows: Module id → rows of its minibatches.
    """

    batch: TrainBatch = field(default_factory=TrainBatch)
    num_batches: int = 0
    num_minibatches: int = 0
    num_env_steps: int = 0
    num_module_steps: dict[str, int] = field(default_factory=dict)
    num_steps_due: Counter[str] = field(default_factory=Counter)
    num_skipped: dict[str, int] = field(default_factory=dict)
    minibatch_rows: dict[str, int] = field(default_factory=dict)


@dataclass
class UpdateTimes:
    """Seconds that updates took in all, and their number: waiting for data, everything else, and of that each stage."""

    num_updates: int = 0
    waited_s: float = 0.0
    updated_s: float = 0.0
    connector_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    reduced_s: float = 0.0

    def results(self) -> dict[str, float]:
        """Return the means by the names of the results."""
        num = max(1, self.num_updates)
        stages = (self.forward_s, self.backward_s, self.reduced_s)
        return {
            "learner_thread_in_queue_wait_timer": self.waited_s / num,
            "learner_thread_update_timer": self.updated_s / num,
            **{name: seconds / num for name, seconds in zip(LEARNER_STAGES, stages, strict=True)},
        }


class UpdateStats:
    """Scalars logged per module and minibatch. Their means over the last epoch are the update's results.

    Reading a scalar tensor costs a device synchronization, so tensors are only collected here. Functions of no
    arguments are called when the results are read, if they are: a serial run reads those of an iteration's last update.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._newest: list[tuple[str, dict[str, Any]]] = []
        self._earlier: dict[str, dict[str, list[Any]]] = {}  # of names that later updates did not log

    def log(self, module_id: str, values: Mapping[str, Scalar | tuple[Any, ...]]) -> None:
        """Log one minibatch's values. Tuples are kept for `newest`, and have no means."""
        self._newest.append(
            (module_id, {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()})
        )

    def take_in(self) -> None:
        """Sort the newest values by name, so that a compiled step always begins with the same empty list."""
        for module_id, values in self._newest:
            collected = self._values[module_id]
            for name, value in values.items():
                collected[name].append(value)
        self._newest.clear()

    def newest(self, name: str, num_last: int) -> dict[str, list[Any]]:
        """Return module id → the last `num_last` values of one name, for modules that logged it."""
        self.take_in()
        return {
            module_id: collected[name][-num_last:]
            for module_id, collected in self._values.items()
            if name in collected
        }

    def means(self, num_last: int) -> dict[str, dict[str, float]]:
        """Return module id → name → mean over the last `num_last` logged values (or all, if fewer).

        What was logged before the last `begin`, and not since then, has the values of that time.
        """
        self.take_in()
        return {
            module_id: {
                name: mean_of(values[-num_last:])
                for name, values in {**self._earlier.get(module_id, {}), **_with_means(collected)}.items()
            }
            for module_id, collected in self._values.items()
        }

    def begin(self) -> None:
        """Begin an update: keep the values so far only for names that it does not log."""
        self.take_in()
        for module_id, collected in self._values.items():
            self._earlier.setdefault(module_id, {}).update(_with_means(collected))
        self._values.clear()

    def clear(self) -> None:
        """Drop all values."""
        self._newest.clear()
        self._values.clear()
        self._earlier.clear()


def _with_means(collected: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: values for name, values in collected.items() if not isinstance(values[0], tuple)}


@torch.no_grad()
def mean_of(values: list[Any]) -> float:
    """Return the mean of logged values; functions are called."""
    values = [value() if callable(value) else value for value in values]
    first = values[0]
    if isinstance(first, Tensor):
        if len(values) == 1 and not first.dim():
            return first.item()
        return float(torch.stack(values).double().mean())
    return float(sum(values) / len(values))
