"""Pieces that split the module's output batch: tensors to arrays, items by episode, entries by sub-env."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from rlzmq.connectors.common.agent_to_module_mapping import MAP_STRUCTURE
from rlzmq.connectors.common.layout import SINGLE_TIME_RANK_FLAG
from rlzmq.connectors.connector_v2 import LAST_STAGE, ConnectorV2
from rlzmq.connectors.rl_modules import is_multi_rl_module, stateful_module_for_key
from rlzmq.connectors.torch_piece import Batch, Memory, TorchPiece
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_map, tree_unstack
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns

__all__ = [
    "ListifyDataForVectorEnv",
    "ModuleToAgentUnmapping",
    "RemoveSingleTsTimeRankFromBatch",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
]


class TensorToNumpy(ConnectorV2):
    """Converts all tensors of the batch, at any depth, to numpy arrays (on the CPU, without gradients)."""

    stage: ClassVar[int] = 2

    def __call__(self, *, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        return {name: tree_map(_to_numpy, data) for name, data in batch.items()}

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2; tensors have this layout already."""
        return TorchPiece()


def _to_numpy(leaf: Any) -> Any:
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf


class UnBatchToIndividualItems(ConnectorV2):
    """Splits every column into items, under the keys that env-to-module used.

    Without these keys in `shared_data`, columns become plain lists.
    """

    stage: ClassVar[int] = 3

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2. Multi-agent: ``{module_id: {column: {(episode, agent, module): [item]}}}``.

        Raises:
            ValueError: A module's outputs have another number of rows than its inputs.
        """
        structure = (shared_data or {}).get(MAP_STRUCTURE)
        if structure is None:
            return {name: tree_unstack(data) for name, data in batch.items()}
        if isinstance(structure, list):
            if is_multi_rl_module(rl_module) and DEFAULT_MODULE_ID in batch:
                batch = batch[DEFAULT_MODULE_ID]
            rows = [(episode_id,) for episode_id in structure]
            return {name: _by_key(name, data, rows, None) for name, data in batch.items()}
        unbatched = {}
        for module_id, columns in batch.items():
            if module_id not in structure:
                raise ValueError(
                    f"module {module_id!r} has outputs, but no agent had inputs for it at this step."
                    f"{did_you_mean(module_id, structure)}"
                )
            keys = [(episode_id, agent_id, module_id) for episode_id, agent_id in structure[module_id]]
            unbatched[module_id] = {
                name: _by_key(name, data, keys, module_id) for name, data in columns.items()
            }
        return unbatched

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2; tensors have this layout already."""
        return TorchPiece()


def _by_key(name: str, data: object, keys: list[Any], module_id: object) -> dict[Any, list[Any]]:
    items = tree_unstack(data)
    if len(items) != len(keys):
        raise ValueError(
            f"column {name!r}{f' of module {module_id!r}' if module_id is not None else ''}: expected "
            f"{len(keys)} rows, as many as the module's inputs had, got {len(items)}."
        )
    by_key: dict[Any, list[Any]] = {}
    for key, item in zip(keys, items, strict=True):
        by_key.setdefault(key, []).append(item)
    return by_key


class ModuleToAgentUnmapping(ConnectorV2):
    """Reverses AgentToModuleMapping for a module's outputs.

    ``{module: {column: {(episode, agent, module): [items]}}}`` becomes
    ``{column: {(episode, agent, module): [items]}}``.
    """

    stage: ClassVar[int] = 4

    def __call__(self, *, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        by_column: dict[str, Any] = {}
        for columns in batch.values():
            for name, by_key in columns.items():
                by_column.setdefault(name, {}).update(by_key)
        return by_column

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2; tensors have this layout already."""
        return TorchPiece()


_WITHOUT_TIME_AXIS = (Columns.STATE_OUT, Columns.STATE_IN, Columns.INFOS)


class RemoveSingleTsTimeRankFromBatch(ConnectorV2):
    """Removes the time axis of length 1 from the items of stateful modules. States have no time axis."""

    stage: ClassVar[int] = 5

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: The length of an item's first axis is not 1.
        """
        if not shared_data or not shared_data.pop(SINGLE_TIME_RANK_FLAG, False):
            return batch
        for name, column in batch.items():
            if name in _WITHOUT_TIME_AXIS:
                continue
            for key, items in column.items() if isinstance(column, dict) else [(None, column)]:
                if rl_module is None or stateful_module_for_key(rl_module, key) is not None:
                    items[:] = [
                        tree_map(lambda leaf, name=name, key=key: _squeezed(leaf, name, key), item)
                        for item in items
                    ]
        return batch

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2."""
        if not rl_module.is_stateful():
            return TorchPiece()

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return {
                name: column if name in _WITHOUT_TIME_AXIS else tree_map(lambda leaf: leaf[:, 0], column)
                for name, column in batch.items()
            }, memory

        return TorchPiece(forward=forward)


def _squeezed(leaf: Any, column: str, key: Any) -> Any:
    shape = np.shape(leaf)
    if not shape or shape[0] != 1:
        raise ValueError(
            f"column {column!r}, key {key}: expected a time axis of length 1 first, got shape "
            f"{tuple(shape)}. "
            "Stateful modules get [B, 1, ...] and return all columns but state_out as [B, 1, ...]."
        )
    return leaf[0]


_EPISODES_MAP = "vector_env_episodes_map"


class ListifyDataForVectorEnv(ConnectorV2):
    """Converts ``{column: {key: [item]}}`` to ``{column: [one entry per sub-env]}``.

    Single-agent: the items, in the order of the batch. Multi-agent: dicts ``{agent_id: item}``, one per episode of
    `episodes` (or at the index in ``shared_data["vector_env_episodes_map"]``).
    """

    stage: ClassVar[int] = LAST_STAGE

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: Multi-agent data belongs to an episode that is not among `episodes`.
        """
        index_of = dict((shared_data or {}).get(_EPISODES_MAP) or {})
        if not index_of:
            index_of = {episode.id_: index for index, episode in enumerate(episodes)}
        return {name: self._listified(name, column, episodes, index_of) for name, column in batch.items()}

    def _listified(
        self, name: str, column: Any, episodes: Sequence[Any], index_of: dict[Any, int]
    ) -> list[Any]:
        if isinstance(column, list):
            return column
        if len(next(iter(column), ())) != 3:
            # No entries: no agent acted.
            return [item for items in column.values() for item in items] or [{} for _ in episodes]
        entries: list[Any] = [{} for _ in episodes]
        for (episode_id, agent_id, _), items in column.items():
            if episode_id not in index_of:
                raise ValueError(f"column {name!r}: episode {episode_id!r} is not one of the given episodes.")
            entries[index_of[episode_id]][agent_id] = items[0]
        return entries

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2; tensors have this layout already."""
        return TorchPiece()
