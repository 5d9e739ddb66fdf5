"""Batching lists of items into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.core.tree import is_nested, tree_flatten, tree_map, tree_stack

__all__ = ["BatchedNdArray", "batch_items"]


class BatchedNdArray(np.ndarray[Any, Any]):
    """An array whose first axis is already the batch axis.

    `ConnectorV2.add_n_batch_items` tags whole columns with it, so that batching concatenates them
    instead of stacking.
    """

    def __new__(cls, array: Any) -> BatchedNdArray:
        """Return a view on `array` (no copy)."""
        return np.asarray(array).view(cls)


def batch_items(items: Sequence[Any]) -> Any:
    """Batch a list of trees into one tree of arrays ``[B, ...]``.

    Items made of `BatchedNdArray` count with all their rows (they are concatenated), all others as
    one row each (they are stacked); both may occur in one list. Items that are torch tensors give a
    tensor.

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


def _batch_leaves(leaves: Sequence[Any]) -> Any:
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


def untagged(tree: Any) -> Any:
    """Return the same tree with `BatchedNdArray` leaves as plain arrays."""
    return tree_map(lambda leaf: leaf.view(np.ndarray) if isinstance(leaf, BatchedNdArray) else leaf, tree)
