"""The data of an update, from what is fresh to minibatches: BatchSource, TrainBatches, MinibatchIterator.

```
fresh episodes ──add──► source ──batches──► learner connector ──► train batches ──► minibatches ──► losses
```

A source decides what a learner rank trains on, given the fresh data of each update:

| source | of | fresh data | an update trains |
|---|---|---|---|
| `FreshBatch` | PPO, IMPALA | this update's | all of it, once |
| `CircularBuffer` | APPO | the newest N batches | 1 to K of them |
| `EpisodeReplay` (`replay_learner`) | DQN, SAC, TQC, TD3 | into a replay buffer | the batches due by `ReplayRatio` |
| `OfflineShards` (`offline_learner`) | BC, MARWIL, CQL, IQL | none | a fixed number of batches from files |

A source belongs to its rank and is never sent between ranks. A rank that joins starts with an empty source, and the
content of a dead rank's source is lost and counted as ``buffer_lost``.

Losses are means over a minibatch's real rows: MaskedMean.
"""

from __future__ import annotations

import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import optree
import torch
from torch import Tensor

from rlzmq.connectors.common.layout import states_are_known, to_tensor
from rlzmq.connectors.rows import TrainRows
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch, concat_joined, num_env_steps_of
from rlzmq.learners.ranks import Ranks
from rlzmq.replay.step_store import Transitions

__all__ = [
    "BatchLearner",
    "BatchSource",
    "CircularBuffer",
    "FreshBatch",
    "MaskedMean",
    "MinibatchIterator",
    "Progress",
    "TrainBatch",
    "TrainBatches",
    "batches_of",
]


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
    uses_priorities: bool = True
    """Whether `update_priorities` is called."""

    def __init__(self) -> None:
        self.source_id: str = uuid.uuid4().hex
        self.num_added: int = 0
        self.progress: Progress | None = None

    @abstractmethod
    def add(self, episodes: object) -> None:
        """Add an update's fresh data: an EpisodeBatch, a list of them, or a list of episodes."""

    @abstractmethod
    def plan_batches(self, num_fresh: int, rank: int, num_ranks: int) -> int:
        """Return the number of batches in this update. Several ranks use the smallest number of any rank.

        Args:
            num_fresh: Fresh env steps of the update, over all ranks.
            rank: This rank's index.
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
    def num_bytes(self) -> int:
        """Size of the kept data, in bytes."""
        return 0

    def get_metrics(self) -> dict[str, Any]:
        """Return further counts for the results, under RLlib's names; {}: there are none."""
        return {}

    def update_priorities(self, module_id: str, td_errors: object, keys: object) -> None:  # noqa: B027
        """Update the priorities of a module's drawn steps.

        Args:
            module_id: The module's id.
            td_errors: float [K].
            keys: int64 [K], the train batch's column ``replay_key``.
        """

    def checkpoint(self) -> Any:  # noqa: B027
        """Return the data that `rollback` needs, without copies of steps. Override both if the source keeps data."""

    def rollback(self, checkpoint: object) -> None:  # noqa: B027
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

    _episodes: Any = None

    def add(self, episodes: object) -> None:
        self._episodes = episodes

    def plan_batches(self, num_fresh: int, rank: int, num_ranks: int) -> int:
        return 1

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        episodes, self._episodes = self._episodes, None
        yield episodes


class CircularBuffer(BatchSource):
    """The newest N batches, each trained up to K times (IMPACT, arXiv:1912.00167).

    Each batch has K uses. An update draws one to K of the remaining uses uniformly, so that N (K - 1) / 2 uses remain
    on average: enough to mix the last N batches, but so few that hardly any expires unused.

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

    def add(self, episodes: object) -> None:
        self._slots = (*self._slots, (episodes, self._iterations))[-self._capacity :]
        self.num_added += num_env_steps_of(episodes)

    def plan_batches(self, num_fresh: int, rank: int, num_ranks: int) -> int:
        above = sum(uses for _, uses in self._slots) - self._capacity * (self._iterations - 1) // 2
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
            getattr(batch, "num_bytes", 0)
            for episodes, uses in self._slots
            if uses
            for batch in batches_of(episodes)
        )


def batches_of(episodes: Any) -> list[Any]:
    """Return the argument of `BatchSource.add` as a list of batches, or of one list of episodes."""
    if hasattr(episodes, "columns"):
        return [episodes]
    items = list(episodes)
    return [items] if items and not hasattr(items[0], "columns") else items


# Of these, a contiguous array of one's own becomes a tensor as it is.
_TENSORS_OF = {np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "float32")}

# Size of the blocks in which minibatches are gathered. One kernel per column serves many minibatches, and a block still
# fits into a core's cache.
_BLOCK_BYTES = 4 * 2**20
# A train batch up to this size is moved to the GPU at once; a larger one stays in host memory and is moved in blocks.
_RESIDENT_BYTES = 256 * 2**20


@dataclass
class TrainBatch:
    """The data of an update: only real rows, by module.

    Attributes:
        columns: Module id → column → tensor or tree of tensors, ``[rows, ...]``; for stateful modules ``[B, T,
            ...]`` with ``loss_mask`` (False where padded) and ``state_in`` ``[B, ...]``.
        num_env_steps: Number of env steps, each counted once.
        num_module_steps: Module id → real timesteps in its columns.
        mean_weights_seq_no: Module id → mean weights version that sampled its data, if known.
        is_last: Whether the update trains no other batch after it.
    """

    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_env_steps: int = 0
    num_module_steps: dict[str, int] = field(default_factory=dict)
    mean_weights_seq_no: dict[str, float] = field(default_factory=dict)
    is_last: bool = True

    def drop(self, module_id: str) -> None:
        """Remove a module's rows. Its env steps remain counted."""
        for part in (self.columns, self.num_module_steps, self.mean_weights_seq_no):
            part.pop(module_id, None)

    def on(self, device: torch.device) -> dict[str, dict[str, Any]]:
        """Return the columns on a device."""
        return {
            module_id: {
                name: column if name == Columns.INFOS else tree_map(lambda leaf: leaf.to(device), column)
                for name, column in columns.items()
            }
            for module_id, columns in self.columns.items()
        }


class BatchLearner(Protocol):
    """What `TrainBatches` uses of its learner."""

    module: Any
    device: torch.device
    source: BatchSource
    ranks: Ranks
    num_minibatches_per_epoch: int
    _learner_connector: Any

    def prepare(self, episodes: Any, *, keeps_forward: bool = False) -> TrainBatch: ...


class TrainBatches:
    """Makes a learner's train batches: of what its source draws, through its connector, or of ready ones.

    Batches of episodes go through the learner connector as rows if its pieces allow it, otherwise as episodes. Both
    give bitwise equal train batches.

    Args:
        learner: The learner.
    """

    def __init__(self, learner: BatchLearner) -> None:
        self._learner = learner

    def drawn(
        self, episodes: object, rng: np.random.Generator, *, keeps_forward: bool
    ) -> Iterator[TrainBatch]:
        """Add an update's fresh episodes to the source and yield what it draws: as many batches on all ranks."""
        source, ranks = self._learner.source, self._learner.ranks
        num_fresh = num_env_steps_of(episodes)
        source.add(episodes)
        if source.keeps_data:
            num_fresh = sum(ranks.gather(num_fresh))
        num_batches = source.plan_batches(num_fresh, ranks.rank, ranks.num)
        if source.keeps_data:
            num_batches = min(ranks.gather(num_batches))
        for batch in source.batches(num_batches, rng):
            num_batches -= 1
            train_batch = self._learner.prepare(batch, keeps_forward=keeps_forward)
            train_batch.is_last = not num_batches
            yield train_batch

    def of_iterators(
        self, data_iterators: Iterable[Iterator[Any]], num_batches: int | None
    ) -> Iterator[TrainBatch]:
        """Yield the batches of iterators, at most so many: each is a minibatch of the update's only epoch."""
        if self._learner.ranks.group is not None and num_batches is None:
            raise ValueError(
                "Learner.update(data_iterators=…) with several ranks needs num_total_minibatches."
            )
        for num, batch in enumerate(islice(chain.from_iterable(data_iterators), num_batches), start=1):
            train_batch = self.of([batch])
            train_batch.is_last = False  # as far as is known
            yield train_batch
            self._learner.num_minibatches_per_epoch = num

    def of(self, batches: Sequence[Mapping[str, Any]]) -> TrainBatch:
        """Return one train batch of ready ones.

        Raises:
            ValueError: There are none, they have different columns, or all are for unknown modules.
        """
        if not batches:
            raise ValueError("Learner.update(batches=…): expected at least one batch, got an empty list.")
        parts = [*map(self._by_module, batches)]
        merged = {
            module_id: _concatenated([part[module_id] for part in parts if module_id in part])
            for module_id in sorted({module_id for part in parts for module_id in part})
        }
        known = self._learner.module.keys()
        if merged and not merged.keys() & known:
            raise ValueError(
                f"Learner.update(batch=…): expected columns by module id, of {sorted(known)}, got the keys "
                f"{sorted(batches[0])}."
            )
        train_batch = self._finish(merged)
        train_batch.num_env_steps = max(train_batch.num_module_steps.values(), default=0)
        return train_batch

    def of_episodes(self, episodes: Any, *, keeps_forward: bool) -> TrainBatch:
        """See `Learner.prepare`."""
        if isinstance(episodes, Transitions) and not episodes.is_read:
            rows = self._transition_columns(episodes)
            if rows is not None:
                num_rows = episodes.num_rows
                return TrainBatch({DEFAULT_MODULE_ID: rows}, num_rows, {DEFAULT_MODULE_ID: num_rows})
        episodes = _without_nesting(episodes)
        columns: dict[str, dict[str, Any]] | None = None
        if isinstance(episodes, EpisodeBatch):
            episodes = episodes.updated()
            num_env_steps = _num_trained_env_steps(episodes)
            columns = self._columns_on_rows(episodes, keeps_forward)
        else:
            num_env_steps = sum(episode.env_steps() for episode in episodes)
        train_batch = self._finish(self._columns_of_episodes(episodes) if columns is None else columns)
        train_batch.num_env_steps = num_env_steps
        return train_batch

    def _transition_columns(self, drawn: Transitions) -> dict[str, Any] | None:
        """Return CPU tensors ``[rows, ...]`` of a buffer's transitions; None if a piece or module needs episodes."""
        connector = self._learner._learner_connector
        module = self._learner.module.get(DEFAULT_MODULE_ID)
        if not connector.on_rows or module is None or module.is_stateful():
            return None
        next_observations = connector.adds_next_observations
        if next_observations is None:
            return None
        return {
            name: torch.from_numpy(column)
            if type(column) is np.ndarray and column.dtype in _TENSORS_OF
            else tree_map(to_tensor, column)
            for name, column in drawn.rows(next_observations=next_observations).items()
        }

    def _columns_on_rows(
        self, episodes: EpisodeBatch, keeps_forward: bool
    ) -> dict[str, dict[str, Any]] | None:
        """Return module id → column → CPU tensor ``[rows, ...]``; None if a piece, or the data, needs episodes."""
        connector, device = self._learner._learner_connector, self._learner.device
        parts = episodes.by_module(are_mapped=connector.maps_agents) if connector.on_rows else None
        if parts is None:
            return None
        result: dict[str, dict[str, Any]] = {}
        for module_id, chunks in parts.items():
            module = self._learner.module.get(module_id)
            if module is None:
                continue
            if chunks is None:
                return None
            if not chunks.length.all():
                chunks = chunks.select(np.flatnonzero(chunks.length))
            if module.is_stateful() and not states_are_known(chunks):
                return None
            if len(chunks):
                rows = TrainRows(chunks, module, module_id, device, keeps_forward=keeps_forward)
                result[module_id] = connector.train_columns(rows)
        return result

    def _columns_of_episodes(self, episodes: Any) -> dict[str, dict[str, Any]]:
        """Return module id → column → tensor, from the pieces' calls with real episodes."""
        if isinstance(episodes, EpisodeBatch):
            episodes = episodes[:]  # a copy, since the pieces' changes must not accumulate over updates
        episodes = [episode for episode in episodes if len(episode)]
        if not episodes:
            return {}
        connector, modules = self._learner._learner_connector, self._learner.module
        outputs = connector(
            rl_module=modules, batch={}, episodes=episodes, explore=False, shared_data={}, metrics=None
        )
        return {module_id: _as_tensors(own) for module_id, own in self._by_module(outputs).items()}

    def _by_module(self, batch: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return module id → column → value for a `batch` that starts at either level."""
        known = {
            module_id: dict(columns)
            for module_id, columns in batch.items()
            if module_id in self._learner.module and isinstance(columns, Mapping)
        }
        if not known:
            return {DEFAULT_MODULE_ID: dict(batch)} if batch else {}
        if stray := [name for name, value in batch.items() if not isinstance(value, Mapping)]:
            raise ConfigurationError(
                f"train batch: expected columns by module id, got also {', '.join(map(repr, stray))} beside "
                f"{', '.join(map(repr, known))}. A connector piece adds a column to batch[module_id]."
            )
        return known

    def _finish(self, columns: dict[str, dict[str, Any]]) -> TrainBatch:
        train_batch = TrainBatch()
        for module_id in sorted(columns):
            module = self._learner.module.get(module_id)
            if module is None:
                continue
            module_columns, num_steps = _real_rows(columns[module_id], module.is_stateful())
            if not num_steps:
                continue
            version = module_columns.get(Columns.WEIGHTS_VERSION)
            if isinstance(version, Tensor):
                mask = module_columns.get(Columns.LOSS_MASK)
                real = version if mask is None else version[mask]
                train_batch.mean_weights_seq_no[module_id] = float(real.double().mean())
            train_batch.columns[module_id] = module_columns
            train_batch.num_module_steps[module_id] = num_steps
        return train_batch


def _num_trained_env_steps(episodes: EpisodeBatch) -> int:
    """Return the number of env steps, without those that the agents' losses leave out."""
    num_trained, has_mask = np.zeros(len(episodes), np.int64), False
    for batch in episodes.agent_batches:
        mask, of_chunks = batch.columns.get(Columns.LOSS_MASK), batch.length
        if mask is not None:
            has_mask = True
            of_chunks = np.bincount(batch.step_chunks()[mask[batch.step_slots()]], minlength=len(batch))
        episode = np.arange(len(batch)) if batch.episode is None else batch.episode
        np.maximum.at(num_trained, episode, of_chunks)
    return int(num_trained.sum()) if has_mask else episodes.num_env_steps


def _without_nesting(episodes: Any) -> object:
    """Return one batch on columns if all episodes are on columns, else a list of episodes."""
    # Chunks that continue each other under the same weights become one, so that no fragment's end cuts a return.
    if isinstance(episodes, EpisodeBatch):
        return episodes
    episodes = list(episodes)
    if episodes and set(map(type, episodes)) == {EpisodeBatch}:
        return episodes[0] if len(episodes) == 1 else concat_joined(episodes)
    flat: list[Any] = []
    for episode in episodes:
        flat += episode if isinstance(episode, EpisodeBatch) else [episode]
    return flat


def _as_tensors(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainable columns, with arrays as tensors (float64 as float32)."""
    result: dict[str, Any] = {}
    for name, column in columns.items():
        if name == Columns.INFOS:
            result[name] = list(column)
        elif isinstance(column, (Tensor, np.ndarray, dict, tuple)):
            result[name] = tree_map(to_tensor, column)
    return result


def _real_rows(columns: dict[str, Any], stateful: bool) -> tuple[dict[str, Any], int]:
    """Return the columns without rows that no loss may see, and the number of real timesteps."""
    # The mask of a stateless module is removed. That of a stateful module is kept, for padded steps.
    mask = columns.get(Columns.LOSS_MASK)
    if mask is None:
        return columns, _num_rows(columns)
    num_steps = int(mask.sum())
    keep = mask if mask.dim() == 1 else mask.flatten(1).any(1)
    if not bool(keep.all()):
        rows = keep.nonzero().squeeze(1)
        chosen = rows.tolist() if Columns.INFOS in columns else []
        for name in list(columns):  # one by one, so that at most one column is in memory twice
            column = columns.pop(name)
            if name == Columns.INFOS:
                columns[name] = [column[row] for row in chosen]
            elif isinstance(column, Tensor):
                columns[name] = column.index_select(0, rows)
            else:
                columns[name] = tree_map(lambda leaf: leaf.index_select(0, rows), column)
    if not stateful:
        del columns[Columns.LOSS_MASK]
    return columns, num_steps


def _num_rows(columns: Mapping[str, Any]) -> int:
    for name, column in columns.items():
        if name == Columns.INFOS:
            continue
        if isinstance(column, Tensor):
            return column.shape[0]
        for leaf in optree.tree_leaves(column):
            return int(np.shape(leaf)[0])
    return 0


def _concatenated(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate several batches with the same columns."""
    tensors = [_as_tensors(part) for part in parts]
    if len(tensors) == 1:
        return tensors[0]
    differing = sorted({name for part in tensors for name in set(part) ^ set(tensors[0])})
    if differing:
        raise ValueError(
            f"Learner.update(batches=…): expected the same columns in all batches, some lack {differing}."
        )
    return {
        name: [info for part in tensors for info in part[name]]
        if name == Columns.INFOS
        else tree_map(lambda *leaves: torch.cat(leaves), *(part[name] for part in tensors))
        for name in tensors[0]
    }


class ModuleRows:
    """One module's train batch, and the stream of its minibatches, epoch after epoch.

    Args:
        columns: Column name → tensor, or a tree (dict, tuple, list) of tensors, each ``[num_rows, ...]``. The
            column ``infos`` remains a list.
        minibatch_rows: Number of rows per minibatch; None: all rows.
        rng: Generator of the permutations, one per epoch, including the first; None: no permutation.
        device: Device of the minibatches.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        minibatch_rows: int | None,
        rng: np.random.Generator | None,
        device: torch.device,
    ) -> None:
        columns = dict(columns)
        self._infos: list[Any] | None = columns.pop(Columns.INFOS, None)
        leaves: list[Any] = list(columns.values())
        self._names, self._treespec = list(columns), None
        if set(map(type, leaves)) != {Tensor}:
            leaves, self._treespec = optree.tree_flatten(columns)  # type: ignore[arg-type]
        self._leaves: list[Tensor] = []
        self._rng, self._device = rng, device
        self.num_rows: int = _num_rows(columns)
        self.minibatch_rows: int = minibatch_rows or self.num_rows
        self._num_bytes = 0
        for leaf in leaves:
            tensor: Tensor = (
                leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.ascontiguousarray(leaf))
            )
            if not tensor.dim() or tensor.shape[0] != self.num_rows:
                self._refuse(columns)
            self._num_bytes += tensor.nbytes
            self._leaves.append(tensor)
        # Every minibatch contains all rows, so their order does not matter and no row is moved.
        self._whole = self.minibatch_rows == self.num_rows
        if device.type != "cpu" and (self._whole or self._num_bytes <= _RESIDENT_BYTES):
            self._leaves = [_pinned(leaf).to(device, non_blocking=True) for leaf in self._leaves]

    def minibatches(self, num_minibatches: int) -> Iterator[dict[str, Any]]:
        """Yield so many minibatches: column name → tree of ``[minibatch_rows, ...]``."""
        if self._whole:
            for _ in range(num_minibatches):
                yield self._assemble(self._leaves, self._infos)
            return
        row_bytes, size = self._num_bytes // self.num_rows, self.minibatch_rows
        per_block = max(1, _BLOCK_BYTES // max(1, row_bytes * size))
        stream = np.empty(0, np.int64)
        while num_minibatches > 0:
            block = min(per_block, num_minibatches)
            num_minibatches -= block
            parts, missing = [stream], block * size - len(stream)
            while missing > 0:
                parts.append(
                    np.arange(self.num_rows) if self._rng is None else self._rng.permutation(self.num_rows)
                )
                missing -= self.num_rows
            stream = np.concatenate(parts)
            rows, stream = stream[: block * size], stream[block * size :]
            indices, columns = torch.from_numpy(rows), []
            for leaf in self._leaves:
                if leaf.device == self._device:
                    gathered = leaf.index_select(0, indices.to(self._device, non_blocking=True))
                else:
                    gathered = _pinned(leaf.index_select(0, indices)).to(self._device, non_blocking=True)
                columns.append(gathered.view(block, size, *leaf.shape[1:]).unbind(0))
            for i, leaves in enumerate(zip(*columns, strict=True)):
                infos = self._infos and [self._infos[row] for row in rows[i * size : (i + 1) * size]]
                yield self._assemble(leaves, infos)

    def _assemble(self, leaves: Iterable[Tensor], infos: list[Any] | None) -> dict[str, Any]:
        minibatch: dict[str, Any] = (
            dict(zip(self._names, leaves, strict=True))
            if self._treespec is None
            else cast(dict[str, Any], optree.tree_unflatten(self._treespec, leaves))
        )
        if infos is not None:
            minibatch[Columns.INFOS] = infos
        return minibatch

    def _refuse(self, columns: Mapping[str, Any]) -> None:
        for name, column in columns.items():
            for leaf in optree.tree_leaves(column):
                shape = tuple(np.shape(leaf))
                if not shape or shape[0] != self.num_rows:
                    raise ValueError(
                        f"train batch column {name!r}: expected {self.num_rows} rows, as many as column "
                        f"{min(columns)!r} has, got shape {shape}."
                    )


class MinibatchIterator:
    """Minibatches of a batch of one or several modules, epoch after epoch.

    Each module's rows form an endless cycle (with a new permutation per epoch), cut into minibatches of exactly
    `minibatch_size` rows. A minibatch larger than the module's batch repeats rows. Each module has as many minibatches
    as cover its rows `num_epochs` times. Iteration ends when every module had its own; those of a module with fewer
    rows than the largest one are spread evenly over it, and the others lack this module.

    Args:
        batch: Module id → column name → tensor (or tree of tensors), ``[rows, ...]`` each.
        minibatch_size: Timesteps per minibatch; None: the whole batch. If a row holds several timesteps (``[B, T,
            ...]``, see `timesteps`), a minibatch has as many rows as contain that many timesteps on average, at least
            one.
        num_epochs: Minimum number of uses of each row.
        shuffle: Whether to draw a new permutation for every epoch, including the first; otherwise rows keep their
            order.
        seed: Seed of the permutations. Each module has an independent stream.
        num_minibatches: Number of minibatches of the module with the most; replaces the one derived from `num_epochs`.
        timesteps: Module id → real timesteps in its batch, for modules whose rows hold several.
        device: Device of the minibatches.

    Attributes:
        modules: The rows of each module that has some.
        num_of_modules: Module id → number of its minibatches.
    """

    def __init__(
        self,
        batch: Mapping[str, Mapping[str, Any]],
        *,
        minibatch_size: int | None,
        num_epochs: int,
        shuffle: bool,
        seed: int,
        num_minibatches: int | None = None,
        timesteps: Mapping[str, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_epochs < 1 or (minibatch_size is not None and minibatch_size < 1):
            raise ValueError(
                f"expected num_epochs ≥ 1 and minibatch_size ≥ 1 (or None), "
                f"got {num_epochs} and {minibatch_size}."
            )
        self.modules: dict[str, ModuleRows] = {}
        self.num_of_modules: dict[str, int] = {}
        for module_id in sorted(batch):
            num_rows = _num_rows(batch[module_id])
            if num_rows == 0:
                continue
            num_timesteps = (timesteps or {}).get(module_id, num_rows)
            rows = minibatch_size
            if rows is not None and num_timesteps != num_rows:
                rows = max(1, num_rows * rows // max(1, num_timesteps))
            rng = np.random.default_rng([seed, zlib.crc32(module_id.encode())]) if shuffle else None
            self.modules[module_id] = ModuleRows(batch[module_id], rows, rng, torch.device(device))
            # Every row is used at least `num_epochs` times.
            self.num_of_modules[module_id] = num_epochs if rows is None else -(-num_epochs * num_rows // rows)
        if num_minibatches is not None and self.modules:
            most = max(self.num_of_modules.values())
            for module_id, num in self.num_of_modules.items():
                self.num_of_modules[module_id] = -(-num * num_minibatches // most)

    def take(
        self, num_of_modules: Mapping[str, int]
    ) -> Iterator[tuple[list[str], dict[str, dict[str, Any]]]]:
        """Yield the ids of the modules that a minibatch trains, on any rank, and this rank's columns of them.

        Args:
            num_of_modules: Module id → number of its minibatches, for modules that have some on any rank.
        """
        streams = {}
        for module_id, rows in self.modules.items():
            streams[module_id] = rows.minibatches(num_of_modules[module_id])
        total = max(num_of_modules.values(), default=0)
        for index in range(total):
            due, minibatch = [], {}
            for module_id, num in num_of_modules.items():
                if (index + 1) * num // total > index * num // total:
                    due.append(module_id)
                    if module_id in streams:
                        minibatch[module_id] = next(streams[module_id])
            yield due, minibatch


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


class MaskedMean:
    """Means of several tensors over the same entries.

    Args:
        mask: The entries that count; None: all.
    """

    def __init__(self, mask: Tensor | None) -> None:
        # Masking without a masked entry is common and would cost a tenth of a small recurrent network's update, so
        # check for it. On a GPU, the check would wait for the GPU; in a compiled step, it would split the graph.
        is_read = mask is not None and mask.device.type == "cpu" and not torch.compiler.is_compiling()
        self._mask = None if mask is None or (is_read and bool(mask.all())) else mask
        self._share = None if self._mask is None else self._mask.sum().clamp(min=1).reciprocal()

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mean of `values` where the mask is True; 0 if it is False everywhere."""
        if self._mask is None or self._share is None:
            return values.mean()
        return self.of_real(values).sum() * self._share

    def of_real(self, values: Tensor) -> Tensor:
        """Return `values` with 0 where the mask is False, so that padding has finite derivatives."""
        return values if self._mask is None else torch.where(self._mask, values, 0.0)
