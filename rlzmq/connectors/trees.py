"""Nested observations, actions and states: mapping over their leaves, batching and unbatching.

A *tree* is a leaf (array, number, tensor) or a dict, tuple or list of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import optree

__all__ = ["BatchedNdArray", "batch_items", "leaves_of", "map_leaves", "unbatch"]

_CONTAINERS = (dict, tuple, list)


class BatchedNdArray(np.ndarray[Any, Any]):
    """An array whose first axis is already the batch axis.

    `ConnectorV2.add_n_batch_items` tags whole columns with it, so that batching concatenates them
    instead of stacking.
    """

    def __new__(cls, array: Any) -> BatchedNdArray:
        """A view on `array` (no copy)."""
        return np.asarray(array).view(cls)


def map_leaves(func: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies `func` to every leaf; containers keep their types. A bare leaf costs one call."""
    if not isinstance(tree, _CONTAINERS):
        return func(tree, *others)
    return optree.tree_map(func, cast("Any", tree), *others, none_is_leaf=True)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves, dict keys in sorted order."""
    if not isinstance(tree, _CONTAINERS):
        return [tree]
    return optree.tree_leaves(cast("Any", tree), none_is_leaf=True)


def batch_items(items: Sequence[Any]) -> Any:
    """One tree of arrays ``[B, ...]`` from a list of trees.

    Items made of `BatchedNdArray` count with all their rows (they are concatenated), all others as
    one row each (they are stacked); both may occur in one list.

    Raises:
        ValueError: Shapes or structures of the items differ; the text names both.
    """
    first = items[0]
    try:
        if not isinstance(first, _CONTAINERS):
            return _batch_leaves(items)
        return optree.tree_map(lambda *leaves: _batch_leaves(leaves), first, *items[1:], none_is_leaf=True)
    except ValueError as error:
        shapes = sorted({str(map_leaves(np.shape, item)) for item in items})
        raise ValueError(
            f"cannot batch {len(items)} items of different shapes or structures: {', '.join(shapes[:4])} ({error})"
        ) from None


def _batch_leaves(leaves: Iterable[Any]) -> npt.NDArray[Any]:
    leaves = list(leaves)
    if any(isinstance(leaf, BatchedNdArray) for leaf in leaves):
        parts = [
            np.asarray(leaf) if isinstance(leaf, BatchedNdArray) else np.asarray(leaf)[None]
            for leaf in leaves
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    if type(leaves[0]).__module__ == "torch":
        import torch

        return torch.stack(leaves)  # type: ignore[return-value]
    return np.stack([np.asarray(leaf) for leaf in leaves])


def unbatch(tree: Any) -> list[Any]:
    """A list of B trees from one tree of arrays ``[B, ...]``; scalars stay numpy scalars."""
    if not isinstance(tree, _CONTAINERS):
        return list(tree)
    leaves, structure = optree.tree_flatten(cast("Any", tree), none_is_leaf=True)
    return [optree.tree_unflatten(structure, row) for row in zip(*leaves, strict=True)]
