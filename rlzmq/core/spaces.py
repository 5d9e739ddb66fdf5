"""Gymnasium spaces: as trees of plain values and arrays and back, their leaves, and values of their shape."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from gymnasium import spaces

from rlzmq.core.plain import BASIC_TYPES, PlainType, TreeReader, TreeWriter, checked_dtype
from rlzmq.core.tree import tree_leaves, tree_map, value_kind

__all__ = [
    "SPACE_TYPES",
    "actions_of_env",
    "actions_of_module",
    "counts_from_0",
    "is_scaled",
    "leaf_paths",
    "leaf_spaces",
    "one_hot",
    "space_filler",
    "space_from_plain",
    "space_to_plain",
    "space_tree",
    "stretched",
]

# Limit on a Box's size: 64 M elements, far above any real observation.
_MAX_ELEMENTS = 2**26
# A Box has two bounds, and creates two arrays of bools and copies of them.
_BOX_COPIES = 6


def _write_box(writer: TreeWriter, space: spaces.Box, where: str, depth: int) -> object:
    bounds = {"low": np.asarray(space.low), "high": np.asarray(space.high)}
    for name, bound in bounds.items():
        if writer.is_short and bound.size > 1 and bool((bound == bound.flat[0]).all()):
            bounds[name] = np.asarray(bound.flat[0])
    return writer.write({**bounds, "shape": list(space.shape), "dtype": space.dtype.str}, where, depth + 1)


def _read_box(reader: TreeReader, content: object, depth: int) -> spaces.Box:
    given = reader.read(content, depth + 1)
    low, high, shape = given["low"], given["high"], tuple(given["shape"])
    dtype = checked_dtype(given["dtype"])
    if not 0 <= math.prod(shape) <= _MAX_ELEMENTS:
        raise ValueError(f"expected a Box of at most {_MAX_ELEMENTS} elements, got shape {shape}.")
    if dtype.kind not in "biuf" or not all(bound.size == 1 or bound.shape == shape for bound in (low, high)):
        raise ValueError(f"expected a Box's bounds of shape {shape}, got {low.shape} and {high.shape}.")
    reader.spend(_BOX_COPIES * math.prod(shape) * dtype.itemsize)
    if low.size == high.size == 1 and dtype.kind != "b":  # numbers, which the Box repeats without copies
        return spaces.Box(low.flat[0], high.flat[0], shape, dtype.type)
    low, high = (np.broadcast_to(b.reshape(()) if b.size == 1 else b, shape) for b in (low, high))
    return spaces.Box(np.array(low), np.array(high), shape, dtype.type)


def _space_type(kind: type[gym.Space[Any]], **attributes: str) -> PlainType:
    """Return the type of a kind of spaces: the constructor's arguments, from the attributes with these names."""

    def write(writer: TreeWriter, space: gym.Space[Any], where: str, depth: int) -> object:
        arguments = {name: getattr(space, attribute) for name, attribute in attributes.items()}
        if "dtype" in arguments:
            arguments["dtype"] = np.dtype(arguments["dtype"]).str
        if "charset" in arguments:
            arguments["charset"] = "".join(sorted(arguments["charset"]))
        return writer.write(arguments, where, depth + 1)

    def read(reader: TreeReader, content: object, depth: int) -> gym.Space[Any]:
        given = reader.read(content, depth + 1)
        arguments = {name: given[name] for name in attributes}
        if "dtype" in arguments:
            arguments["dtype"] = checked_dtype(arguments["dtype"]).type
        return kind(**arguments)

    return PlainType(f"__{kind.__name__}__", kind, write, read, with_subclasses=True)


SPACE_TYPES = BASIC_TYPES.with_types(
    PlainType("__Box__", spaces.Box, _write_box, _read_box, with_subclasses=True),
    _space_type(spaces.Discrete, n="n", start="start", dtype="dtype"),
    _space_type(spaces.MultiDiscrete, nvec="nvec", start="start", dtype="dtype"),
    _space_type(spaces.MultiBinary, n="n"),
    _space_type(spaces.Dict, spaces="spaces"),
    _space_type(spaces.Tuple, spaces="spaces"),
    _space_type(spaces.OneOf, spaces="spaces"),
    _space_type(spaces.Sequence, space="feature_space", stack="stack"),
    _space_type(spaces.Text, max_length="max_length", min_length="min_length", charset="character_set"),
    _space_type(spaces.Graph, node_space="node_space", edge_space="edge_space"),
)
"""Gymnasium's own spaces, without their random states and subclasses."""


_writer, _reader = TreeWriter(), TreeReader()
_writer.types = _reader.types = SPACE_TYPES


def space_to_plain(space: gym.Space[Any] | None) -> dict[str, Any] | None:
    """Return the plain form of a Gymnasium space (or of None), without its random state and subclass.

    Equal spaces have equal plain forms, in all processes.

    Raises:
        NotPlainError: The space is not one of Gymnasium's own.
    """
    return _writer.write(space, "space")  # type: ignore[no-any-return]


def space_from_plain(plain: object) -> gym.Space[Any] | None:
    """Return the space of a plain form from `space_to_plain`.

    Raises:
        ValueError: The value is not the plain form of a space.
    """
    space = _reader.read(plain)
    if not isinstance(space, gym.Space | None):
        raise ValueError(f"expected a space's plain form, got that of a {type(space).__name__}.")
    return space


def space_tree(space: gym.Space[Any]) -> Any:
    """Return the leaves of a space as a tree: a Dict becomes a dict, a Tuple a tuple."""
    if isinstance(space, spaces.Dict):
        return {key: space_tree(part) for key, part in space.spaces.items()}
    return tuple(map(space_tree, space.spaces)) if isinstance(space, spaces.Tuple) else space


def leaf_spaces(space: gym.Space[Any]) -> list[Any]:
    """Return the leaves of a space in the order of `tree_leaves`, with Dict keys sorted."""
    return tree_leaves(space_tree(space))


def leaf_paths(space: gym.Space[Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Return (keys and positions that lead to it, leaf) of each leaf, with Dict keys sorted."""
    paths, leaves, _ = optree.tree_flatten_with_path(space_tree(space))
    return list(zip(paths, leaves, strict=True))


def is_scaled(space: gym.Space[Any]) -> bool:
    """Return whether modules act in [-1, 1] instead of within the bounds of this part of a space."""
    return isinstance(space, spaces.Box) and space.dtype.kind == "f" and space.is_bounded()


def counts_from_0(space: gym.Space[Any]) -> bool:
    """Return whether modules choose a number of steps from the lower bound, in a bounded Box of integers."""
    return isinstance(space, spaces.Box) and space.dtype.kind in "iu" and space.is_bounded()


def stretched(low: Any, high: Any, dtype: Any, actions: Any) -> Any:
    """Return actions in [-1, 1] as values of a Box with these bounds, clipped."""
    return np.clip(low + (actions + 1.0) * ((high - low) / 2.0), low, high).astype(dtype, copy=False)


def actions_of_module(space: gym.Space[Any], actions: Any, *, scales: bool) -> Any:
    """Return the actions that a module would have chosen for the env's, a tree of arrays ``[..., *shape]``.

    Args:
        space: The env's action space.
        actions: An action, or a tree of arrays of actions.
        scales: Whether modules act in [-1, 1] where the space `is_scaled`. Those of bounded integer Boxes always count
            from 0.
    """

    def chosen(part: Any, values: Any) -> Any:
        if counts_from_0(part):
            return np.asarray(values).astype(np.int64) - part.low
        if not scales or not is_scaled(part):
            return values
        width = np.where(part.high > part.low, part.high - part.low, 1.0)
        return (2.0 * (values - part.low) / width - 1.0).astype(np.float32)

    return tree_map(chosen, space_tree(space), actions)


def actions_of_env(space: gym.Space[Any], actions: Any, *, scales: bool) -> Any:
    """Return the env's actions for a module's; the inverse of `actions_of_module`. What is scaled is clipped."""

    def for_env(part: Any, values: Any) -> Any:
        if counts_from_0(part):
            return (part.low + values).astype(part.dtype)
        if not scales or not is_scaled(part):
            return values
        return stretched(part.low, part.high, part.dtype, values)

    return tree_map(for_env, space_tree(space), actions)


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

    def filled(leaf: gym.Space[Any]) -> Any:
        if one_hot_discrete and isinstance(leaf, spaces.Discrete):
            return np.full((*lead, int(leaf.n)), fill, np.float32)
        if one_hot_discrete and isinstance(leaf, spaces.MultiDiscrete):
            return np.full((*lead, int(leaf.nvec.sum())), fill, np.float32)
        if leaf.shape is None or leaf.dtype is None:
            return fill
        return np.full((*lead, *leaf.shape), fill, leaf.dtype)

    return tree_map(filled, space_tree(space))


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
