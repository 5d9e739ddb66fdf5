"""Helpers of pieces: reading episodes, adding items to the batch, and batching lists of items into arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import is_nested, tree_flatten, tree_map, tree_stack
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["BatchItemMethods", "BatchedNdArray", "batch_items"]


_PLAIN = frozenset({SingleAgentEpisode})


class BatchedNdArray(np.ndarray[Any, Any]):
    """An array whose first axis is already the batch axis.

    `ConnectorV2.add_n_batch_items` marks whole columns with it, so that batching concatenates them instead of stacking
    them.
    """

    def __new__(cls, array: object) -> BatchedNdArray:
        """Return a view of `array`, without a copy."""
        return np.asarray(array).view(cls)


def batch_items(items: Sequence[Any]) -> Any:
    """Batch a list of trees into one tree of arrays ``[B, ...]``.

    Items made of `BatchedNdArray` are concatenated and count with all their rows. All other items are stacked and count
    as one row each. Both may occur in one list. If items are torch tensors, the result is a tensor.

    Raises:
        ValueError: Shapes or structures of the items differ; the text names both.
    """
    first = items[0]
    if is_nested(first):
        leaves, spec = tree_flatten(first)
        rows = []
        for position, item in enumerate(items):
            try:
                rows.append(spec.flatten_up_to(item))
            except (ValueError, TypeError) as error:
                raise ValueError(f"item {position} has another structure than item 0: {error}") from None
        return spec.unflatten([_batch_leaves([row[i] for row in rows]) for i in range(len(leaves))])
    return _batch_leaves(items)


def _batch_leaves(leaves: Sequence[Any]) -> object:
    if any(isinstance(leaf, BatchedNdArray) for leaf in leaves):
        parts = [
            leaf.view(np.ndarray) if isinstance(leaf, BatchedNdArray) else np.asarray(leaf)[None]
            for leaf in leaves
        ]
        return parts[0] if len(parts) == 1 else _concatenate(parts)
    if type(leaves[0]).__module__ == "torch":
        import torch

        return torch.stack(list(leaves))
    return tree_stack(leaves)


def _concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    for position, part in enumerate(parts):
        if part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"item {position} has rows of shape {part.shape[1:]}, expected {parts[0].shape[1:]} like "
                "item 0."
            )
    return np.concatenate(parts)


class BatchItemMethods:
    """Static helper methods of ConnectorV2, for use in every piece's ``__call__``."""

    @staticmethod
    def single_agent_episode_iterator(
        episodes: Sequence[Any],
        agents_that_stepped_only: bool = True,
        zip_with_batch_column: Mapping[tuple[Any, ...], list[Any]] | list[Any] | None = None,
    ) -> Iterator[Any]:
        """Yield all SingleAgentEpisodes in the order of the batch: by episode, then by agent.

        Args:
            episodes: SingleAgentEpisodes, MultiAgentEpisodes, batches of either, or a mixture.
            agents_that_stepped_only: In MultiAgentEpisodes, yield only agents with a new observation at the last env
                step. Learner pipelines pass False.
            zip_with_batch_column: A batch column in phase 2. If given, yield pairs (episode, item); the k-th item of
                a key belongs to the k-th episode of that key.

        Raises:
            ValueError: The column has no item for one of the episodes.
        """
        if zip_with_batch_column is not None:
            return _zipped(_iterate(episodes, agents_that_stepped_only), zip_with_batch_column)
        if type(episodes) is list and _PLAIN.issuperset(map(type, episodes)):
            return iter(episodes)
        return _iterate(episodes, agents_that_stepped_only)

    @staticmethod
    def add_batch_item(
        batch: dict[str, Any],
        column: str,
        item_to_add: object,
        single_agent_episode: SingleAgentEpisode | None = None,
    ) -> None:
        """Append one item to a column, under the episode's key.

        Args:
            batch: In phase 1 or 2.
            column: Column name; the column is created if missing.
            item_to_add: A tree without batch axis.
            single_agent_episode: The episode that the item belongs to; None: the column is a plain list.

        Raises:
            ValueError: The column already holds the other kind (plain list / by episode), or batched data.
        """
        key = None if single_agent_episode is None else single_agent_episode.batch_key
        _items_of(batch, column, key).append(item_to_add)

    @staticmethod
    def add_n_batch_items(
        batch: dict[str, Any],
        column: str,
        items_to_add: object,
        num_items: int,
        single_agent_episode: SingleAgentEpisode | None = None,
    ) -> None:
        """Append `num_items` items to a column, under the episode's key.

        Args:
            batch: In phase 1 or 2.
            column: Column name; the column is created if missing.
            items_to_add: A list of `num_items` items, or a tree of arrays ``[num_items, ...]``, which is stored as a
                single entry of BatchedNdArrays.
            num_items: Number of items.
            single_agent_episode: See `add_batch_item`.

        Raises:
            ValueError: `items_to_add` has another length; see also `add_batch_item`.
        """
        key = None if single_agent_episode is None else single_agent_episode.batch_key
        if isinstance(items_to_add, list):
            if len(items_to_add) != num_items:
                raise ValueError(
                    f"column {column!r}, key {key}: expected {num_items} items, got {len(items_to_add)}."
                )
            _items_of(batch, column, key).extend(items_to_add)
            return

        def tag(leaf: object) -> Any:
            array = BatchedNdArray(leaf)
            if array.ndim == 0 or len(array) != num_items:
                raise ValueError(
                    f"column {column!r}, key {key}: expected an array [{num_items}, ...], got shape "
                    f"{array.shape}."
                )
            return array

        _items_of(batch, column, key).append(tree_map(tag, items_to_add))

    @staticmethod
    def foreach_batch_item_change_in_place(
        batch: dict[str, Any],
        column: str | Sequence[str],
        func: Callable[[Any, Any, Any, Any], Any],
    ) -> None:
        """Replace every item of one or several columns by a function of the item.

        Args:
            batch: In phase 2.
            column: A column name, or a list of names; `func` then receives and returns a tuple of items.
            func: ``func(item, episode_id, agent_id, module_id) -> new item``; unknown ids are None. Items that were
                added as one array for many steps are passed as that BatchedNdArray, ``[num_items, ...]``.

        Raises:
            ValueError: A column is missing, not in phase 2, or the columns' items do not match.
        """
        columns = [column] if isinstance(column, str) else list(column)
        for name in columns:
            if name not in batch:
                raise ValueError(f"column {name!r} is not in the batch.{did_you_mean(name, batch)}")
            if not isinstance(batch[name], (dict, list)):
                raise ValueError(
                    f"column {name!r}: expected items in a list or by episode, got "
                    f"{type(batch[name]).__name__} (already batched?)."
                )
        first = batch[columns[0]]
        keys = [None] if isinstance(first, list) else list(first)
        for key in keys:
            lists = [batch[name] if key is None else batch[name][key] for name in columns]
            if len({len(items) for items in lists}) > 1:
                raise ValueError(f"columns {columns}, key {key}: numbers of items differ.")
            ids = (*key, None, None)[:3] if key is not None else (None, None, None)
            for index, items in enumerate(zip(*lists, strict=True)):
                if isinstance(column, str):
                    lists[0][index] = _tag_like(items[0], func(items[0], *ids))
                    continue
                for target, old, new in zip(lists, items, func(items, *ids), strict=True):
                    target[index] = _tag_like(old, new)

    @staticmethod
    def switch_batch_from_column_to_module_ids(
        batch: dict[str, dict[str, Any]],
    ) -> dict[str, dict[str, Any]]:
        """Convert ``{column: {module_id: data}}`` to ``{module_id: {column: data}}``."""
        by_module: dict[str, dict[str, Any]] = {}
        for column, column_data in batch.items():
            for module_id, data in column_data.items():
                by_module.setdefault(module_id, {})[column] = data
        return by_module


def _zipped(
    episodes: Iterator[Any], column: Mapping[tuple[Any, ...], list[Any]] | list[Any]
) -> Iterator[tuple[Any, Any]]:
    num_taken: dict[Any, int] = {}
    by_key = not isinstance(column, list)
    for episode in episodes:
        key = episode.batch_key if by_key else None
        items: Any = column.get(key, []) if by_key else column  # type: ignore[union-attr,arg-type]
        index = num_taken.get(key, 0)
        if index >= len(items):
            valid = did_you_mean(key, column) if by_key else ""
            raise ValueError(
                f"zip_with_batch_column has {len(items)} item(s) {f'under {key}' if by_key else ''} but "
                f"episode {episode.id_!r} needs item number {index}.{valid}"
            )
        num_taken[key] = index + 1
        yield episode, items[index]


def _iterate(episodes: Sequence[Any], agents_that_stepped_only: bool) -> Iterator[Any]:
    for episode in episodes:
        if type(episode) is SingleAgentEpisode:
            yield episode
        elif hasattr(episode, "agent_episodes"):
            observed = episode.get_agents_that_observed() if agents_that_stepped_only else None
            # In the order of agent_episodes, because the order of a set of ids differs between processes.
            for agent_id, agent_episode in episode.agent_episodes.items():
                if observed is None or agent_id in observed:
                    yield agent_episode
        elif isinstance(episode, Sequence):
            yield from _iterate(episode, agents_that_stepped_only)
        else:
            yield episode


def _items_of(batch: dict[str, Any], column: str, key: tuple[Any, ...] | None) -> list[Any]:
    """Return the list that holds the items of (column, key)."""
    if key is None:
        items = batch.setdefault(column, [])
    else:
        by_key = batch.setdefault(column, {})
        items = by_key.setdefault(key, []) if isinstance(by_key, dict) else by_key
    if not isinstance(items, list) or (key is not None and items is batch[column]):
        raise ValueError(
            f"column {column!r} holds {type(batch[column]).__name__}: cannot add an item "
            f"{'without episode' if key is None else f'of episode {key}'} to it."
        )
    return items


def _tag_like(old: object, new: object) -> object:
    """Mark the result of an array-wise function as many steps if its input was."""
    if isinstance(old, BatchedNdArray) and not isinstance(new, (BatchedNdArray, dict, tuple, list)):
        return BatchedNdArray(new)
    return new
