"""BatchSource: decides what a learner rank trains on, given the fresh data of each update.

```
update:  fresh episodes ──add──► source ──batches──► learner connector ──► train batches ──► minibatches
```

| source | fresh data | an update trains |
|---|---|---|
| `FreshBatch` | this update's | all of it, once |
| `CircularBuffer` | the newest N batches | 1 to K of them |
| `EpisodeReplay` | a replay buffer | the number of batches given by `ReplayRatio` |
| `OfflineShards` | none | a fixed number of batches from files |

A source belongs to its rank and is never sent between ranks. A rank that joins starts with an empty source, and the
content of a dead rank's source is lost and counted as ``buffer_lost``.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

__all__ = ["BatchSource", "CircularBuffer", "FreshBatch", "Progress", "batches_of", "num_env_steps_of"]


class Progress(Protocol):
    """Counts that are the same on all ranks."""

    def get_state(self) -> dict[str, int]:
        """Return the counts."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""


class BatchSource(ABC):
    """Receives fresh episodes and returns the batches of each update.

    An update calls `add` once, then `batches`. If the update fails and will be repeated, `rollback` undoes both.

    Attributes:
        source_id: Unique id within the run, by which the driver notices that a source is gone.
        num_added: Number of env steps of kept data added since the source was created or its state was set.
        progress: Counts that determine, together with the fresh data, what an update trains. They are part of the
            learners' state and equal on all ranks. None: there are no counts.
    """

    keeps_data: ClassVar[bool] = False
    """Whether later updates may train the data of this one.

    If so, ranks must agree on the number of batches, and an update without batches still counts.
    """
    divides_by_module: bool = False
    """Whether steps are stored by module, so that `set_modules` is called."""

    def __init__(self) -> None:
        self.source_id: str = uuid.uuid4().hex
        self.num_added: int = 0
        self.progress: Progress | None = None

    def set_rank(self, rank: int, num_ranks: int) -> None:  # noqa: B027
        """Set this rank's index and the number of ranks; called before each update."""

    def set_modules(self, module_ids: Collection[str], trained: Collection[str]) -> None:  # noqa: B027
        """Set the learner's modules. Called before each update and after a module was removed.

        Args:
            module_ids: Modules that can be trained. A source that stores steps by module drops those of other modules.
            trained: Modules that updates may train now; only these get batches.
        """

    @abstractmethod
    def add(self, episodes: object) -> None:
        """Add an update's fresh data: an EpisodeBatch, a list of them, or a list of episodes."""

    @abstractmethod
    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        """Return the number of batches in this update. Several ranks use the smallest number of any rank.

        Args:
            num_fresh: Fresh env steps of the update, over all ranks.
            num_ranks: Number of ranks.
        """

    @abstractmethod
    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        """Yield the batches of the update, in the types that `add` accepts.

        Args:
            num_batches: At most the result of `plan_batches`.
            rng: The update's random generator.
        """

    @property
    def num_env_steps(self) -> int:
        """Number of env steps kept for later updates."""
        return 0

    @property
    def num_agent_steps_not_kept(self) -> int:
        """Number of agent steps that were not stored, or removed, because the learner has no such module.

        Counted from the same time as `num_added`.
        """
        return 0

    @property
    def num_bytes(self) -> int:
        """Size of the kept data, in bytes."""
        return 0

    def get_metrics(self) -> dict[str, Any]:
        """Return further counts for the results, under RLlib's names; {}: there are none."""
        return {}

    def update_priorities(self, module_id: str, td_errors: object, keys: object) -> None:  # noqa: B027
        """Update the priorities of a module's drawn steps. Ignored by sources that do not draw by priority.

        Args:
            module_id: The module's id.
            td_errors: float [K].
            keys: int64 [K], the train batch's column ``replay_key``.
        """

    @abstractmethod
    def checkpoint(self) -> Any:
        """Return the data that `rollback` needs. Cheap: no data is copied."""

    @abstractmethod
    def rollback(self, checkpoint: object) -> None:
        """Restore the source to a result of `checkpoint`."""

    def get_state(self) -> dict[str, Any]:
        """Return the kept data as plain values and arrays, for checkpoints. Call it between two updates."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replace all kept data by a state from `get_state`.

        Raises:
            ValueError: The state belongs to another kind of source.
        """
        if state:
            raise ValueError(f"{type(self).__name__}: expected the empty state, got {sorted(state)}.")


class FreshBatch(BatchSource):
    """Every fresh step, in this update only; for on-policy algorithms (PPO) and IMPALA."""

    def __init__(self) -> None:
        super().__init__()
        self._episodes: Any = None

    def add(self, episodes: object) -> None:
        self._episodes = episodes

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        return 1

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        episodes, self._episodes = self._episodes, None
        yield episodes

    def checkpoint(self) -> Any:
        return self._episodes

    def rollback(self, checkpoint: object) -> None:
        self._episodes = checkpoint


class CircularBuffer(BatchSource):
    """The newest N batches, each trained up to K times (IMPACT, arXiv:1912.00167).

    Each batch has K uses. An update draws one to K of the remaining uses uniformly, so that N (K - 1) / 2 uses remain
    on
    average: enough to mix the last N batches, but so few that hardly any expires unused.

    Args:
        num_batches: N, >= 1.
        iterations_per_batch: K, >= 1.
    """

    keeps_data = True

    def __init__(self, num_batches: int, iterations_per_batch: int) -> None:
        super().__init__()
        self._capacity = num_batches
        self._iterations = iterations_per_batch
        self._slots: tuple[tuple[Any, int], ...] = ()  # (batch, remaining uses), oldest first

    @property
    def num_uses_left(self) -> int:
        """Number of draws possible without a fresh batch."""
        return sum(uses for _, uses in self._slots)

    def add(self, episodes: object) -> None:
        self._slots = (*self._slots, (episodes, self._iterations))[-self._capacity :]
        self.num_added += num_env_steps_of(episodes)

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

    def checkpoint(self) -> Any:
        return self._slots, self.num_added

    def rollback(self, checkpoint: Any) -> None:
        self._slots, self.num_added = checkpoint

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
    """Return the argument of `BatchSource.add` as a list of batches, or of one list of episodes."""
    if hasattr(episodes, "columns"):
        return [episodes]
    items = list(episodes)
    if items and not hasattr(items[0], "columns"):
        return [items]
    return items


def num_env_steps_of(episodes: Any) -> int:
    """Return the number of env steps in the argument of `BatchSource.add`."""
    if hasattr(episodes, "num_env_steps"):
        return int(episodes.num_env_steps)
    num = 0
    for item in episodes:
        of_batch = getattr(item, "num_env_steps", None)
        num += int(item.env_steps() if of_batch is None else of_batch)
    return num
