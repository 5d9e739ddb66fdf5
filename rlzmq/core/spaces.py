"""Gymnasium spaces: as trees of plain values and arrays and back, their leaves, and values of their shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from gymnasium import spaces

from rlzmq.core.plain import NotPlainError, checked_dtype, from_plain, to_plain
from rlzmq.core.tree import tree_leaves, tree_map, value_kind

__all__ = [
    "leaf_paths",
    "leaf_spaces",
    "one_hot",
    "space_filler",
    "space_from_parts",
    "space_from_plain",
    "space_parts",
    "space_to_plain",
    "space_tree",
]

_MAX_DEPTH = 16
# Limit on a Box's size: 64 M elements, far above any real observation.
_MAX_ELEMENTS = 2**26
# A Box has two bounds, and creates two arrays of bools and copies of them.
_BOX_COPIES = 6


def space_to_plain(space: gym.Space[Any] | None) -> dict[str, Any] | None:
    """Return the plain form of a Gymnasium space (or of None), without its random state and subclass.

    Equal spaces have equal plain forms, in all processes.

    Raises:
        NotPlainError: The space is not one of Gymnasium's own.
    """
    plain: dict[str, Any] | None = to_plain(space_parts(space, is_short=True))
    return plain


def space_from_plain(plain: object) -> gym.Space[Any] | None:
    """Return the space of a plain form from `space_to_plain`.

    Raises:
        ValueError: The value is not the plain form of a space.
    """
    return space_from_parts(from_plain(plain))


def space_parts(space: gym.Space[Any] | None, *, is_short: bool = False) -> dict[str, Any] | None:
    """Return a space's parts for `space_from_parts`, a tree of plain values and arrays.

    Args:
        space: The space, or None.
        is_short: Whether to give a Box's bounds as one value if all elements are equal, and a Text's characters sorted.

    Raises:
        NotPlainError: The space is not one of Gymnasium's own.
    """
    if space is None:
        return None
    if isinstance(space, spaces.Box):
        bounds = {"low": np.asarray(space.low), "high": np.asarray(space.high)}
        for name, bound in bounds.items():
            if is_short and bound.size > 1 and bool((bound == bound.flat[0]).all()):
                bounds[name] = np.asarray(bound.flat[0])
        return {"kind": "box", **bounds, "shape": list(space.shape), "dtype": space.dtype.str}
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "start": int(space.start), "dtype": _dtype(space)}
    if isinstance(space, spaces.MultiDiscrete):
        vectors = {"nvec": np.asarray(space.nvec), "start": np.asarray(space.start)}
        return {"kind": "multi_discrete", **vectors, "dtype": _dtype(space)}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "multi_binary", "n": list(space.n) if isinstance(space.n, tuple) else int(space.n)}
    if isinstance(space, spaces.Dict):
        pairs = [[key, space_parts(sub, is_short=is_short)] for key, sub in space.spaces.items()]
        return {"kind": "dict", "spaces": pairs}
    if isinstance(space, spaces.Tuple | spaces.OneOf):
        subs = [space_parts(sub, is_short=is_short) for sub in space.spaces]
        return {"kind": "tuple" if isinstance(space, spaces.Tuple) else "one_of", "spaces": subs}
    if isinstance(space, spaces.Sequence):
        item = space_parts(space.feature_space, is_short=is_short)
        return {"kind": "sequence", "space": item, "stack": bool(space.stack)}
    if isinstance(space, spaces.Text):
        charset = "".join(sorted(space.character_set) if is_short else space.character_list)
        return {
            "kind": "text",
            "min": int(space.min_length),
            "max": int(space.max_length),
            "charset": charset,
        }
    if isinstance(space, spaces.Graph):
        node, edge = (space_parts(sub, is_short=is_short) for sub in (space.node_space, space.edge_space))
        return {"kind": "graph", "node": node, "edge": edge}
    raise NotPlainError(f"expected one of Gymnasium's own spaces, got {type(space).__name__}: {space}.")


def _dtype(space: gym.Space[Any]) -> str:
    return np.dtype(space.dtype).str


def space_from_parts(
    parts: object, allocate: Callable[[int], None] = lambda num_bytes: None
) -> gym.Space[Any] | None:
    """Return the space of these parts. The parts are not trusted.

    Args:
        parts: The parts from `space_parts`.
        allocate: Called with the number of bytes that a Box will take; may raise an error.

    Raises:
        ValueError: They are not the parts of a space.
    """
    try:
        return _decode(parts, 0, allocate)
    except (
        ValueError,
        KeyError,
        TypeError,
        AssertionError,
        OverflowError,
        AttributeError,
        IndexError,
    ) as error:
        raise ValueError(
            f"expected a space's plain form, got one that does not fit: {repr(error)[:200]}."
        ) from error


def _decode_present(parts: object, depth: int, allocate: Callable[[int], None]) -> gym.Space[Any]:
    space = _decode(parts, depth, allocate)
    if space is None:
        raise ValueError("expected a space inside of a space, got None.")
    return space


def _decode(parts: Any, depth: int, allocate: Callable[[int], None]) -> gym.Space[Any] | None:
    if parts is None:
        return None
    if depth > _MAX_DEPTH:
        raise ValueError(f"expected spaces nested at most {_MAX_DEPTH} deep.")
    kind = parts["kind"]
    if kind == "box":
        shape, dtype = tuple(parts["shape"]), checked_dtype(parts["dtype"])
        if not 0 <= math.prod(shape) <= _MAX_ELEMENTS:
            raise ValueError(f"expected a Box of at most {_MAX_ELEMENTS} elements, got shape {shape}.")
        low, high = parts["low"], parts["high"]
        fits = all(bound.size == 1 or bound.shape == shape for bound in (low, high))
        if dtype.kind not in "biuf" or not fits:
            raise ValueError(f"expected a Box's bounds of shape {shape}, got {low.shape} and {high.shape}.")
        allocate(_BOX_COPIES * math.prod(shape) * dtype.itemsize)
        if low.size == 1:
            low = np.broadcast_to(low.reshape(()), shape)
        if high.size == 1:
            high = np.broadcast_to(high.reshape(()), shape)
        return spaces.Box(np.array(low), np.array(high), shape, dtype.type)
    if kind == "discrete":
        return spaces.Discrete(parts["n"], start=parts["start"], dtype=_integer(parts["dtype"]))
    if kind == "multi_discrete":
        return spaces.MultiDiscrete(parts["nvec"], dtype=_integer(parts["dtype"]), start=parts["start"])
    if kind == "multi_binary":
        return spaces.MultiBinary(parts["n"])
    if kind == "dict":
        return spaces.Dict({key: _decode_present(sub, depth + 1, allocate) for key, sub in parts["spaces"]})
    if kind in ("tuple", "one_of"):
        subs = [_decode_present(sub, depth + 1, allocate) for sub in parts["spaces"]]
        return spaces.Tuple(subs) if kind == "tuple" else spaces.OneOf(subs)
    if kind == "sequence":
        return spaces.Sequence(_decode_present(parts["space"], depth + 1, allocate), stack=parts["stack"])
    if kind == "text":
        return spaces.Text(parts["max"], min_length=parts["min"], charset=parts["charset"])
    if kind == "graph":
        node, edge = (_decode(parts[name], depth + 1, allocate) for name in ("node", "edge"))
        return spaces.Graph(node, edge)  # type: ignore[arg-type]
    raise ValueError("expected a known kind of space.")


def _integer(text: object) -> Any:
    dtype = checked_dtype(text)
    if dtype.kind not in "biu":
        raise ValueError(f"expected the dtype of an integer, got {dtype}.")
    return dtype.type


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
