"""Conversion of observations to the dtypes of their space, with checks of shape and structure."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import tree_map, tree_stack

__all__ = ["as_batch_of", "as_value_of", "first_row", "refuse_tuple"]

_ARRAYS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def as_value_of(space: Any, value: Any) -> Any:
    """Return one value of a space, with its parts as arrays of the space's dtypes.

    Raises:
        ValueError: The shape or structure differs; the text names the part, the expected and the actual one.
    """
    refuse_tuple(space, value)
    return _converted(space, value, (), "observation")


def refuse_tuple(space: Any, value: Any) -> None:
    """Raise ValueError if a value is all that ``reset`` or ``step`` returned."""
    names = {2: "observation, info", 5: "observation, reward, terminated, truncated, info"}
    if not isinstance(value, tuple) or isinstance(space, gym.spaces.Tuple) or len(value) not in names:
        return
    if isinstance(value[-1], dict):
        call = "env.reset()" if len(value) == 2 else "env.step(…)"
        raise ValueError(
            f"expected an observation, but you passed ({names[len(value)]}), which is what {call} returns. "
            f"Pass {call}[0]."
        )


def as_batch_of(space: Any, values: Any) -> Any:
    """Return many values of a space, or a list of single ones, as one tree of arrays ``[N, ...]``.

    Raises:
        ValueError: See `as_value_of`.
    """
    if isinstance(values, list):
        if not values:
            raise ValueError("expected at least one observation, got an empty list.")
        return tree_stack([as_value_of(space, value) for value in values])
    return _converted(space, values, (None,), "observations")


def first_row(batch: Any) -> Any:
    """Return the first item of a tree of arrays ``[N, ...]``."""
    return tree_map(lambda leaf: leaf[0], batch)


def _converted(space: Any, value: Any, lead: tuple[None, ...], where: str) -> Any:
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{where}: expected a dict with the keys {sorted(space.spaces)}, got {got}.")
        return {key: _converted(part, value[key], lead, f"{where}[{key!r}]") for key, part in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space):
            raise ValueError(f"{where}: expected a tuple of {len(space)} parts, got {value!r:.80}.")
        parts = zip(space, value, strict=True)
        return tuple(_converted(part, own, lead, f"{where}[{i}]") for i, (part, own) in enumerate(parts))
    if not isinstance(space, _ARRAYS):
        return value
    array = np.asarray(value)
    if array.dtype != space.dtype:
        array = array.astype(space.dtype)
    if array.ndim < len(lead) or array.shape[len(lead) :] != space.shape:
        shape = tuple(space.shape or ())
        expected = ("N", *shape) if lead else shape
        raise ValueError(f"{where}: expected shape {expected}, got {array.shape}; the space is {space}.")
    return array
