"""Operations on dict/tuple trees of arrays, such as nested observations and actions.

A tree is a leaf, or a dict or tuple of trees. Dicts are traversed in sorted key order. A Python list is a leaf (a batch
of items, or one item that numpy can convert to an array), never a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
import optree
from optree.utils import total_order_sorted

__all__ = [
    "as_numpy",
    "check_same_structure",
    "is_nested",
    "leaf_spaces",
    "num_items",
    "object_array",
    "one_hot",
    "space_filler",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_rows",
    "tree_stack",
    "tree_unstack",
    "tree_zeros_like",
    "value_kind",
]


def is_nested(tree: Any) -> bool:
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


def tree_leaves(tree: Any) -> list[Any]:
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


def check_same_structure(expected: Any, actual: Any) -> None:
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


def as_numpy(leaf: Any) -> Any:
    """Convert a tensor (or anything array-like) to a numpy array."""
    if hasattr(leaf, "detach"):
        return leaf.detach().cpu().numpy()
    return np.asarray(leaf)


def num_items(batch: Any) -> int:
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


def tree_zeros_like(tree: Any, lead: tuple[int, ...] = ()) -> Any:
    """Return zeros with every leaf's shape and dtype, with ``lead`` as additional first dimensions."""

    def zeros(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        return np.zeros((*lead, *array.shape), array.dtype)

    return tree_map(zeros, tree)


def leaf_spaces(space: gym.Space[Any]) -> list[Any]:
    """Return the leaves of a space in the order of `tree_leaves`, with Dict keys sorted."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for key in sorted(space.spaces) for leaf in leaf_spaces(space.spaces[key])]
    if isinstance(space, gym.spaces.Tuple):
        return [leaf for part in space.spaces for leaf in leaf_spaces(part)]
    return [space]


def space_filler(
    space: gym.Space[Any], fill: Any, *, lead: tuple[int, ...] = (), one_hot_discrete: bool = False
) -> Any:
    """Return an item (or a batch of items) with ``space``'s structure, shapes and dtypes, filled with one value.

    Args:
        space: A space with Dict, Tuple, Box, Discrete, MultiDiscrete and MultiBinary parts. Leaves of other kinds
            become the plain ``fill``.
        fill: The value of every element. It may be outside of the space.
        lead: Dimensions added before each leaf's shape, e.g. ``(num_items,)``.
        one_hot_discrete: Whether Discrete and MultiDiscrete leaves have the shape of `one_hot`'s results (float32).

    Returns:
        Arrays (0-d ones for scalar spaces) in the space's structure.
    """
    if isinstance(space, gym.spaces.Dict):
        return {
            key: space_filler(sub_space, fill, lead=lead, one_hot_discrete=one_hot_discrete)
            for key, sub_space in space.spaces.items()
        }
    if isinstance(space, gym.spaces.Tuple):
        return tuple(
            space_filler(sub_space, fill, lead=lead, one_hot_discrete=one_hot_discrete)
            for sub_space in space.spaces
        )
    if one_hot_discrete and isinstance(space, gym.spaces.Discrete):
        return np.full((*lead, int(space.n)), fill, np.float32)
    if one_hot_discrete and isinstance(space, gym.spaces.MultiDiscrete):
        return np.full((*lead, int(space.nvec.sum())), fill, np.float32)
    if space.shape is None or space.dtype is None:
        return fill
    return np.full((*lead, *space.shape), fill, space.dtype)


def one_hot(space: gym.Space[Any], value: Any) -> Any:
    """One-hot encode the Discrete and MultiDiscrete leaves of an item or of a batch of items.

    Args:
        space: The space of one item.
        value: An item of ``space``, or a batch of items with any leading dimensions.

    Returns:
        The same structure. A Discrete leaf ``[...]`` becomes float32 ``[..., n]``. A MultiDiscrete leaf ``[...,
        *nvec.shape]`` becomes the concatenated one-hots, float32 ``[..., sum(nvec)]``. Other leaves are unchanged.

    Raises:
        ValueError: A value is not a number, or is outside of its Discrete or MultiDiscrete space.
    """
    if isinstance(space, gym.spaces.Dict):
        return {key: one_hot(sub_space, value[key]) for key, sub_space in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(one_hot(sub_space, part) for sub_space, part in zip(space.spaces, value, strict=True))
    if isinstance(space, gym.spaces.Discrete):
        return _one_hot_discrete(_numbers_of(space, value) - space.start, int(space.n), space)
    if isinstance(space, gym.spaces.MultiDiscrete):
        array = _numbers_of(space, value) - space.start
        flat = array.reshape((*array.shape[: array.ndim - space.nvec.ndim], space.nvec.size))
        parts = [_one_hot_discrete(flat[..., i], int(n), space) for i, n in enumerate(space.nvec.reshape(-1))]
        return np.concatenate(parts, axis=-1)
    return value


def _numbers_of(space: gym.Space[Any], value: object) -> np.ndarray:
    array = np.asarray(value)
    if value_kind(array.dtype) != "number":
        raise ValueError(f"expected values of {space} to one-hot encode, got {value!r:.80}.")
    return array


def _one_hot_discrete(index: np.ndarray, n: int, space: gym.Space[Any]) -> np.ndarray:
    if index.size and (index.min() < 0 or index.max() >= n):
        low, high = int(index.min()), int(index.max())
        raise ValueError(f"expected values in 0…{n - 1} (start of {space} taken off), got {low}…{high}.")
    result = np.zeros((*index.shape, n), np.float32)
    np.put_along_axis(result, np.asarray(index, np.int64)[..., None], 1.0, axis=-1)
    return result
