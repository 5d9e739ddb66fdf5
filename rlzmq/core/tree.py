"""Operations on dict/tuple trees of arrays, such as nested observations and actions.

A tree is a leaf, or a dict or tuple of trees. Dicts are traversed in sorted key order. A Python list is a leaf (a batch
of items, or one item that numpy can convert to an array), never a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import optree
from optree.utils import total_order_sorted

__all__ = [
    "as_numpy",
    "check_same_structure",
    "is_nested",
    "num_items",
    "object_array",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_rows",
    "tree_stack",
    "tree_unstack",
    "tree_zeros_like",
    "value_kind",
]


def is_nested(tree: object) -> bool:
    """Return whether ``tree`` is a node (dict or tuple) instead of a leaf."""
    return isinstance(tree, (dict, tuple))


def _list_is_leaf(node: object) -> bool:
    return type(node) is list


def _ordered(keys: dict[Any, Any]) -> list[Any]:
    """Return a dict's keys in the order in which optree visits them."""
    try:
        return sorted(keys)
    except TypeError:
        return list(total_order_sorted(keys))


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply ``function`` to every leaf of ``tree`` (and the matching leaves of ``others``).

    Raises:
        ValueError: The structures differ (missing or extra keys, other node types).
    """
    if not isinstance(tree, (dict, tuple)):
        return function(tree, *others)
    if type(tree) is dict and not others:  # a third of optree's time for small trees
        by_key = dict.fromkeys(tree)
        for key in _ordered(tree):
            by_key[key] = tree_map(function, tree[key])
        return by_key
    mapped: Any = optree.tree_map(
        function, cast(Any, tree), *others, is_leaf=_list_is_leaf, none_is_leaf=True
    )
    return mapped


def tree_rows(tree: Any, rows: Any) -> Any:
    """Return some rows of every leaf.

    Args:
        tree: Tree of arrays or tensors.
        rows: What indexes their first dimension: positions, a mask or a slice.
    """
    return tree_map(lambda leaf: leaf[rows], tree) if isinstance(tree, (dict, tuple)) else tree[rows]


def tree_leaves(tree: object) -> list[Any]:
    """Return the leaves of ``tree``, with dicts in sorted key order."""
    if not isinstance(tree, (dict, tuple)):
        return [tree]
    if type(tree) is dict:
        leaves: list[Any] = []
        for key in _ordered(tree):
            leaves += tree_leaves(tree[key])
        return leaves
    return optree.tree_leaves(cast(Any, tree), is_leaf=_list_is_leaf, none_is_leaf=True)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of ``tree`` and its structure (an optree ``PyTreeSpec``; ``unflatten`` is the inverse)."""
    leaves, spec = optree.tree_flatten(tree, is_leaf=_list_is_leaf, none_is_leaf=True)
    return leaves, spec


def check_same_structure(expected: object, actual: object) -> None:
    """Raise ValueError if ``actual`` does not have the nodes of ``expected``."""
    nested = is_nested(expected)
    if nested != is_nested(actual):
        raise ValueError(
            f"expected {'a nested ' + type(expected).__name__ if nested else 'a plain item'}, "
            f"got {type(actual).__name__}."
        )
    if nested:
        _, spec = tree_flatten(expected)
        spec.flatten_up_to(actual)


def value_kind(dtype: np.dtype[Any]) -> str:
    """Return ``"number"``, ``"string"``, ``"Python object"``, or numpy's kind. A column holds one kind."""
    if dtype.hasobject:
        return "Python object"
    return "number" if dtype.kind in "biufc" else "string" if dtype.kind in "SUT" else dtype.kind


def as_numpy(leaf: object) -> Any:
    """Convert a tensor (or anything array-like) to a numpy array."""
    if hasattr(leaf, "detach"):
        return leaf.detach().cpu().numpy()
    return np.asarray(leaf)


def num_items(batch: object) -> int:
    """Return the number of items in a batched tree: the common first dimension of its leaves.

    Raises:
        ValueError: The leaves' sizes differ, or a leaf has no first dimension.
    """
    if isinstance(batch, np.ndarray) and batch.ndim:
        return len(batch)
    leaves = tree_leaves(batch)
    if not leaves:
        raise ValueError("expected a tree with at least one array, got an empty one.")
    sizes = [np.shape(leaf)[0] if np.ndim(leaf) else -1 for leaf in leaves]
    if sizes[0] < 0 or any(size != sizes[0] for size in sizes):
        raise ValueError(
            "expected arrays with one common first dimension (the items), got shapes "
            f"{[tuple(np.shape(leaf)) for leaf in leaves]}."
        )
    return sizes[0]


def object_array(items: Sequence[Any]) -> np.ndarray:
    """Return items of any kind, unchanged, in an array ``[len(items)]`` of dtype object."""
    array = np.empty(len(items), object)
    for position, item in enumerate(items):
        array[position] = item
    return array


def tree_stack(items: Sequence[Any], *, objects: bool = False) -> Any:
    """Stack items with equal structure along a new first axis.

    Args:
        items: At least one tree. Matching leaves have equal shapes.
        objects: Whether leaves may be of any kind (None, sets, instances of any class). They become an array
            ``[len(items)]`` of dtype object.

    Returns:
        The tree with leaves ``[len(items), ...]``.

    Raises:
        ValueError: An item's structure or shape differs from the first one's (the text names its position), strings
            and numbers are mixed, or (without ``objects``) items are not numbers, strings or arrays of them.
    """
    first = items[0]
    if not isinstance(first, (dict, tuple)):
        return _stack_leaves(items, objects)
    leaves, spec = tree_flatten(first)
    per_leaf: list[list[Any]] = [[] for _ in leaves]
    for position, item in enumerate(items):
        try:
            flat = spec.flatten_up_to(item)
        except (ValueError, TypeError) as error:
            raise ValueError(f"item {position} has another structure than item 0: {error}") from None
        for column, leaf in zip(per_leaf, flat, strict=True):
            column.append(leaf)
    return spec.unflatten([_stack_leaves(column, objects) for column in per_leaf])


def _stack_leaves(items: Sequence[Any], objects: bool) -> np.ndarray:
    first = items[0]
    if hasattr(first, "__array__") and not isinstance(first, (np.ndarray, np.generic)):
        # Tensors are stacked by torch: numpy would split them element by element.
        items = [np.asarray(item) for item in items]
    try:
        stacked = np.array(items)
    except (ValueError, TypeError, RuntimeError):
        shapes = [np.shape(item) for item in items]
        bad = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if bad is None:
            raise
        raise ValueError(f"item {bad} has shape {shapes[bad]}, expected {shapes[0]} like item 0.") from None
    if stacked.dtype.hasobject:
        if objects:
            return object_array(items)
        if isinstance(first, np.ndarray) and first.dtype.hasobject:
            raise ValueError("items are arrays of Python objects (dtype object): no column for these.")
        bad = next((i for i, item in enumerate(items) if np.asarray(item).dtype.hasobject), 0)
        raise ValueError(f"item {bad} of type {type(items[bad]).__name__} can't be a column of numbers.")
    if stacked.dtype.kind in "SUT":
        _check_one_kind(items)
    return stacked


def _check_one_kind(items: Sequence[Any]) -> None:
    """Raise ValueError if numbers are mixed with strings, since numpy would convert them to strings."""
    kinds = [value_kind(np.asarray(item).dtype) for item in items]
    bad = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
    if bad is not None:
        raise ValueError(f"item {bad} is a {kinds[bad]} ({items[bad]!r}), expected a {kinds[0]} like item 0.")


def tree_unstack(batch: Any) -> list[Any]:
    """Return the items of a batched tree (views of its leaves), or ``list(batch)`` for a plain sequence."""
    if not isinstance(batch, (dict, tuple)):
        return list(batch)
    leaves, spec = tree_flatten(batch)
    num_items(batch)
    return [spec.unflatten(item) for item in zip(*leaves, strict=True)]


def tree_zeros_like(tree: object, lead: tuple[int, ...] = ()) -> Any:
    """Return zeros with every leaf's shape and dtype, with ``lead`` as additional first dimensions."""

    def zeros(leaf: object) -> np.ndarray:
        array = np.asarray(leaf)
        return np.zeros((*lead, *array.shape), array.dtype)

    return tree_map(zeros, tree)
