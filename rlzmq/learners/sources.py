"""BatchSource: what one learner rank trains on, made of the fresh data that it is given.

```
update:  fresh episodes ──add──► source ──batches──► learner connector ──► train batches ──► minibatches
```

| source | fresh data | an update trains |
|---|---|---|
| `FreshBatch` | this update's | all of it, once |
| `CircularBuffer` | the newest N batches | 1 to K of them |
| `EpisodeReplay` | a replay buffer | as many batches as the `ReplayRatio` says |
| `OfflineShards` | none | a fixed number of batches from files |

A source belongs to its rank. It is never part of what ranks send each other: a rank that joins begins with
an empty one, and what a dead rank's source held is gone, and counted as ``buffer_lost``.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlzmq.core.replay_ratio import ReplayRatio

__all__ = ["BatchSource", "CircularBuffer", "FreshBatch", "batches_of", "num_env_steps_of"]


class BatchSource(ABC):
    """Takes in fresh episodes, and says what the update at hand trains on.

    An update calls `add` once, then `batches`. If the update fails and will be repeated, `rollback` undoes
    both.

    Attributes:
        source_id: Of this source alone, in all of the run: by it the driver sees that one is gone.
        ratio: How much an update trains, where it is not what the fresh data make; the same on all ranks.
    """

    def __init__(self) -> None:
        self.source_id = uuid.uuid4().hex
        self.ratio: ReplayRatio | None = None

    @abstractmethod
    def add(self, episodes: Any) -> None:
        """Take in an update's fresh data: an EpisodeBatch, a list of them, or a list of episodes."""

    @abstractmethod
    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        """How many batches this update trains here; several ranks train the fewest that any of them has.

        Args:
            num_fresh: Fresh env steps of the update, over all ranks.
            num_ranks: How many these are.
        """

    @abstractmethod
    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        """What the update trains on, one batch after the other: values as `add` took them.

        Args:
            num_batches: At most what `plan_batches` returned.
            rng: The update's own stream, where something is drawn.
        """

    @property
    def keeps_data(self) -> bool:
        """Whether updates to come may train what this one took in, so that ranks must agree on how many batches they
        train, and an update that trains none is one all the same."""
        return False

    @property
    def num_env_steps(self) -> int:
        """Env steps that it keeps for updates to come."""
        return 0

    @property
    def num_added(self) -> int:
        """Env steps that it took in since it was made, or since its state was set."""
        return 0

    @property
    def num_bytes(self) -> int:
        """Size of what it keeps, in bytes."""
        return 0

    def replace(self, batch: Any, usable: Any) -> bool:
        """Keep `usable` in place of a batch that `batches` gave, of which some made a loss overflow.

        Args:
            batch: The very object.
            usable: What may be trained of it; None: nothing.

        Returns:
            Whether what is unusable is not kept any more. Sources that do not know what a batch was made of may give
            it again: then it is found again.
        """
        return not self.keeps_data

    @abstractmethod
    def checkpoint(self) -> Any:
        """What `rollback` needs; cheap, nothing is copied."""

    @abstractmethod
    def rollback(self, checkpoint: Any) -> None:
        """Back to where the source was when `checkpoint` was called."""

    def get_state(self) -> dict[str, Any]:
        """What it keeps, as plain values and arrays, between two updates; for checkpoints that ask for it."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Keep what `get_state` gave, and nothing else.

        Raises:
            ValueError: The state is another kind of source's.
        """
        if state:
            raise ValueError(f"{type(self).__name__}: expected the empty state, got {sorted(state)}.")


class FreshBatch(BatchSource):
    """Every fresh step, in this update only. On-policy algorithms: PPO; also IMPALA."""

    def __init__(self) -> None:
        super().__init__()
        self._episodes: Any = None

    def add(self, episodes: Any) -> None:
        self._episodes = episodes

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
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
        super().__init__()
        self._capacity = num_batches
        self._iterations = iterations_per_batch
        self._slots: tuple[tuple[Any, int], ...] = ()  # (batch, uses left), the oldest first
        self._num_added = 0

    @property
    def num_uses_left(self) -> int:
        """How many more times a batch can be drawn without a fresh one."""
        return sum(uses for _, uses in self._slots)

    def add(self, episodes: Any) -> None:
        self._slots = (*self._slots, (episodes, self._iterations))[-self._capacity :]
        self._num_added += num_env_steps_of(episodes)

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
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

    def replace(self, batch: Any, usable: Any) -> bool:
        self._slots = tuple(
            (usable, uses if usable is not None else 0) if held is batch else (held, uses)
            for held, uses in self._slots
        )
        return True

    @property
    def keeps_data(self) -> bool:
        return True

    def checkpoint(self) -> Any:
        return self._slots, self._num_added

    def rollback(self, checkpoint: Any) -> None:
        self._slots, self._num_added = checkpoint

    @property
    def num_added(self) -> int:
        return self._num_added

    @property
    def num_env_steps(self) -> int:
        return sum(num_env_steps_of(episodes) for episodes, uses in self._slots if uses)

    @property
    def num_bytes(self) -> int:
        return sum(
            batch.num_bytes
            for episodes, uses in self._slots
            if uses
            for batch in batches_of(episodes)
            if hasattr(batch, "num_bytes")
        )


def batches_of(episodes: Any) -> list[Any]:
    """What `BatchSource.add` got, as a list of batches, or of one list of episodes."""
    if hasattr(episodes, "columns") or hasattr(episodes, "rows"):
        return [episodes]
    items = list(episodes)
    if items and not hasattr(items[0], "num_env_steps"):
        return [items]
    return items


def num_env_steps_of(episodes: Any) -> int:
    """Env steps of what `BatchSource.add` got."""
    if hasattr(episodes, "num_env_steps"):
        return int(episodes.num_env_steps)
    return sum(
        int(item.num_env_steps) if hasattr(item, "num_env_steps") else int(item.env_steps())
        for item in episodes
    )
