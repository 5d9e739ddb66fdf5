"""TrainBatchBuilder: builds one train batch per module from a Learner's data (episodes, ready batches)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlzmq.connectors.common.numpy_to_tensor import to_tensor
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch, concat_joined
from rlzmq.learners.fused_batch import fused_columns, transition_columns
from rlzmq.replay.step_store import Transitions

__all__ = ["TrainBatch", "TrainBatchBuilder"]


@dataclass
class TrainBatch:
    """The data of an update: only real rows, by module.

    Attributes:
        columns: Module id → column → tensor or tree of tensors, ``[rows, ...]``; for stateful modules ``[B, T,
            ...]`` with ``loss_mask`` (False where padded) and ``state_in`` ``[B, ...]``.
        num_env_steps: Number of env steps, each counted once.
        num_module_steps: Module id → real timesteps in its columns.
        mean_weights_seq_no: Module id → mean weights version that sampled its data, if known.
    """

    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_env_steps: int = 0
    num_module_steps: dict[str, int] = field(default_factory=dict)
    mean_weights_seq_no: dict[str, float] = field(default_factory=dict)

    def drop(self, module_id: str) -> None:
        """Remove a module's rows. Its env steps remain counted."""
        for part in (self.columns, self.num_module_steps, self.mean_weights_seq_no):
            part.pop(module_id, None)

    def add_counts(self, other: TrainBatch) -> None:
        """Add another batch's counters, without its rows."""
        self.num_env_steps += other.num_env_steps
        for module_id, version in other.mean_weights_seq_no.items():
            num_before, num_added = self.num_module_steps.get(module_id, 0), other.num_module_steps[module_id]
            mean = self.mean_weights_seq_no.get(module_id, 0.0)
            self.mean_weights_seq_no[module_id] = (mean * num_before + version * num_added) / (
                num_before + num_added
            )
        for module_id, num_steps in other.num_module_steps.items():
            self.num_module_steps[module_id] = self.num_module_steps.get(module_id, 0) + num_steps

    def on(self, device: torch.device) -> dict[str, dict[str, Any]]:
        """Return the columns on a device."""
        return {
            module_id: {
                name: column if name == Columns.INFOS else tree_map(lambda leaf: leaf.to(device), column)
                for name, column in columns.items()
            }
            for module_id, columns in self.columns.items()
        }


class TrainBatchBuilder:
    """Builds train batches from episodes or ready batches.

    Episodes on columns go through the learner connector in one fused pass if its pieces allow it, otherwise through its
    per-episode protocol. Both give bitwise equal train batches.

    Args:
        learner_connector: The LearnerConnectorPipeline.
        module: The MultiRLModule.
        device: Device of the module.
    """

    def __init__(self, learner_connector: Any, module: Any, device: torch.device) -> None:
        self.learner_connector = learner_connector
        self.module = module
        self.device = device
        self.use_fused_path = True

    def build(
        self,
        *,
        batch: Mapping[str, Any] | TrainBatch | None = None,
        batches: Sequence[Mapping[str, Any]] | None = None,
        episodes: Any = None,
        keeps_forward: bool = False,
    ) -> TrainBatch:
        """Return the train batch for exactly one source. A TrainBatch given as `batch` is returned unchanged.

        With `keeps_forward`, a batch of episodes has the column ``FORWARD_OUTPUTS`` where the connector computes them
        anyway; it may be trained once, with the current weights.

        Raises:
            ValueError: The source is empty.
        """
        if isinstance(batch, TrainBatch):
            return batch
        if episodes is not None:
            return self._of_episodes(episodes, keeps_forward)
        parts = [self._by_module(one) for one in (batches if batch is None else [batch]) or ()]
        if not parts:
            raise ValueError("Learner.update(batches=…): expected at least one batch, got an empty list.")
        merged = {
            module_id: _concatenated([part[module_id] for part in parts if module_id in part])
            for module_id in sorted({module_id for part in parts for module_id in part})
        }
        train_batch = self._finish(merged)
        train_batch.num_env_steps = max(train_batch.num_module_steps.values(), default=0)
        return train_batch

    def _of_episodes(self, episodes: Any, keeps_forward: bool) -> TrainBatch:
        if isinstance(episodes, Transitions) and self.use_fused_path:
            rows = transition_columns(self.learner_connector, self.module, episodes)
            if rows is not None:
                num_rows = episodes.num_rows
                return TrainBatch({DEFAULT_MODULE_ID: rows}, num_rows, {DEFAULT_MODULE_ID: num_rows})
        episodes = _without_nesting(episodes)
        columns: dict[str, dict[str, Any]] | None = None
        if isinstance(episodes, EpisodeBatch):
            episodes = episodes.updated()
            num_env_steps = _num_trained_env_steps(episodes)
            if self.use_fused_path:
                columns = fused_columns(
                    self.learner_connector, self.module, episodes, self.device, keeps_forward=keeps_forward
                )
        else:
            num_env_steps = sum(episode.env_steps() for episode in episodes)
        if columns is None:
            if isinstance(episodes, EpisodeBatch):
                episodes = episodes[:]  # a copy, since the pieces' changes must not accumulate over updates
            episodes = [episode for episode in episodes if len(episode)]
            outputs = self._by_module(
                self.learner_connector(
                    rl_module=self.module,
                    batch={},
                    episodes=episodes,
                    explore=False,
                    shared_data={},
                    metrics=None,
                )
                if episodes
                else {}
            )
            columns = {module_id: _as_tensors(own) for module_id, own in outputs.items()}
        train_batch = self._finish(columns)
        train_batch.num_env_steps = num_env_steps
        return train_batch

    def _by_module(self, batch: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return module id → column → value for a `batch` that starts at either level."""
        known = {
            module_id: dict(columns)
            for module_id, columns in batch.items()
            if module_id in self.module and isinstance(columns, Mapping)
        }
        if known or not batch:
            return known
        return {DEFAULT_MODULE_ID: dict(batch)}

    def _finish(self, columns: dict[str, dict[str, Any]]) -> TrainBatch:
        train_batch = TrainBatch()
        for module_id in sorted(columns):
            if module_id not in self.module:
                continue
            stateful = self.module[module_id].is_stateful()
            module_columns, num_steps = _real_rows(columns[module_id], stateful)
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
    batches = episodes.agent_batches
    if all(Columns.LOSS_MASK not in batch.columns for batch in batches):
        return episodes.num_env_steps
    num_trained = np.zeros(len(episodes), np.int64)
    for batch in batches:
        episode = np.arange(len(batch)) if batch.episode is None else batch.episode
        mask = batch.columns.get(Columns.LOSS_MASK)
        of_chunks = batch.length
        if mask is not None:
            of_chunks = np.bincount(batch.step_chunks()[mask[batch.step_slots()]], minlength=len(batch))
        np.maximum.at(num_trained, episode, of_chunks)
    return int(num_trained.sum())


def _without_nesting(episodes: Any) -> Any:
    """Return one batch on columns if all episodes are on columns, else a list of episodes.

    Chunks that continue each other under the same weights become one, so that no return is cut where a fragment ended.
    """
    if isinstance(episodes, EpisodeBatch):
        return episodes
    episodes = list(episodes)
    if episodes and all(isinstance(episode, EpisodeBatch) for episode in episodes):
        return episodes[0] if len(episodes) == 1 else concat_joined(episodes)
    flat: list[Any] = []
    for episode in episodes:
        if isinstance(episode, EpisodeBatch):
            flat.extend(episode)
        else:
            flat.append(episode)
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
    """Return the columns without rows that no loss may see, and the number of real timesteps.

    The mask of a stateless module is removed. That of a stateful module is kept, for padded steps.
    """
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
            columns[name] = (
                [column[row] for row in chosen]
                if name == Columns.INFOS
                else tree_map(lambda leaf: leaf.index_select(0, rows), column)
            )
    if not stateful:
        del columns[Columns.LOSS_MASK]
    return columns, num_steps


def _num_rows(columns: Mapping[str, Any]) -> int:
    for name, column in columns.items():
        if name != Columns.INFOS:
            leaves: list[Tensor] = []
            tree_map(leaves.append, column)
            return int(leaves[0].shape[0])
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
