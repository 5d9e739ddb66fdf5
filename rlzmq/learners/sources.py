"""BatchSource: what one learner rank trains on, made of the fresh data that it is given.

```
update:  fresh episodes ──add──► source ──batches──► learner connector ──► train batches ──► minibatches
```

A source belongs to its rank. It is never part of what ranks send each other: a rank that joins begins with
an empty one, and what a dead rank's source held is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["BatchSource", "CircularBuffer", "FreshBatch"]


class BatchSource(ABC):
    """Takes in fresh episodes, and says what the update at hand trains on.

    An update calls `add` once, then `batches`. If the update fails and will be repeated, `rollback` undoes
    both.
    """

    @abstractmethod
    def add(self, episodes: Any) -> None:
        """Take in an update's fresh data: an EpisodeBatch, a list of them, or a list of episodes."""

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """How many batches this update trains here; several ranks train the fewest that any of them has."""

    @abstractmethod
    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        """What the update trains on, one batch after the other: values as `add` took them.

        Args:
            num_batches: At most `num_batches`.
            rng: The update's own stream, where something is drawn.
        """

    @property
    def repeats(self) -> bool:
        """Whether data may be trained by more than one update, so that ranks must agree on `num_batches`."""
        return False

    @abstractmethod
    def checkpoint(self) -> Any:
        """What `rollback` needs; cheap, nothing is copied."""

    @abstractmethod
    def rollback(self, checkpoint: Any) -> None:
        """Back to where the source was when `checkpoint` was called."""


class FreshBatch(BatchSource):
    """Every fresh step, in this update only. On-policy algorithms: PPO; also IMPALA."""

    def __init__(self) -> None:
        self._episodes: Any = None

    def add(self, episodes: Any) -> None:
        self._episodes = episodes

    @property
    def num_batches(self) -> int:
        return 1

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        episodes, self._episodes = self._episodes, None
        yield episodes

    def checkpoint(self) -> Any:
        return self._episodes

    def rollback(self, checkpoint: Any) -> None:
        self._episodes = checkpoint


class CircularBuffer(BatchSource):
    """The newest N batches, each trained up to K times (IMPACT, arXiv:1912.00167).

    Every batch brings K uses. An update draws one to K of the uses that are left, uniformly, so that N (K - 1) / 2
    stay in store: enough to mix the last N batches, few enough that hardly any falls out unused.

    Args:
        num_batches: N, >= 1.
        iterations_per_batch: K, >= 1.
    """

    def __init__(self, num_batches: int, iterations_per_batch: int) -> None:
        self._capacity = num_batches
        self._iterations = iterations_per_batch
        self._slots: tuple[tuple[Any, int], ...] = ()  # (batch, uses left), the oldest first

    @property
    def num_uses_left(self) -> int:
        """How many more times a batch can be drawn without a fresh one."""
        return sum(uses for _, uses in self._slots)

    def add(self, episodes: Any) -> None:
        self._slots = (*self._slots, (episodes, self._iterations))[-self._capacity :]

    @property
    def num_batches(self) -> int:
        above = self.num_uses_left - self._capacity * (self._iterations - 1) // 2
        return min(max(above, 1), self._iterations)

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        for _ in range(num_batches):
            uses = np.array([left for _, left in self._slots])
            index = int(rng.choice(len(uses), p=uses / uses.sum()))
            episodes, left = self._slots[index]
            drawn = (episodes if left > 1 else None, left - 1)
            self._slots = (*self._slots[:index], drawn, *self._slots[index + 1 :])
            yield episodes

    @property
    def repeats(self) -> bool:
        return True

    def checkpoint(self) -> Any:
        return self._slots

    def rollback(self, checkpoint: Any) -> None:
        self._slots = checkpoint
