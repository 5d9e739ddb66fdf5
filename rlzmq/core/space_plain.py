"""Conversion of Gymnasium spaces to plain values and back."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlzmq.core.plain import NotPlainError, checked_dtype, from_plain, to_plain

__all__ = ["space_from_plain", "space_to_plain"]

_MAX_DEPTH = 16
# Limit on a Box's size: 64 M elements are far above any real observation.
_MAX_ELEMENTS = 2**26


def space_to_plain(space: gym.Space[Any] | None) -> dict[str, Any] | None:
    """Return the plain form of a Gymnasium space (or of None); random state and subclass are not part of it.

    Raises:
        NotPlainError: For a kind of space that is not Gymnasium's own.
    """
    if space is None:
        return None
    if isinstance(space, spaces.Box):
        return {
            "kind": "box",
            "low": _bound(space.low),
            "high": _bound(space.high),
            "shape": list(space.shape),
            "dtype": space.dtype.str,
        }
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "start": int(space.start), "dtype": _dtype(space)}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "kind": "multi_discrete",
            "nvec": to_plain(np.asarray(space.nvec)),
            "start": to_plain(np.asarray(space.start)),
            "dtype": _dtype(space),
        }
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "multi_binary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"kind": "dict", "spaces": [[key, space_to_plain(sub)] for key, sub in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"kind": "tuple", "spaces": [space_to_plain(sub) for sub in space.spaces]}
    if isinstance(space, spaces.OneOf):
        return {"kind": "one_of", "spaces": [space_to_plain(sub) for sub in space.spaces]}
    if isinstance(space, spaces.Sequence):
        return {"kind": "sequence", "space": space_to_plain(space.feature_space), "stack": bool(space.stack)}
    if isinstance(space, spaces.Text):
        charset = "".join(sorted(space.character_set))
        return {"kind": "text", "min": space.min_length, "max": space.max_length, "charset": charset}
    if isinstance(space, spaces.Graph):
        return {
            "kind": "graph",
            "node": space_to_plain(space.node_space),
            "edge": space_to_plain(space.edge_space),
        }
    raise NotPlainError(f"expected one of Gymnasium's own spaces, got {type(space).__name__}: {space}.")


def _dtype(space: gym.Space[Any]) -> str:
    return np.dtype(space.dtype).str


def _bound(bound: np.ndarray) -> dict[str, Any]:
    """Return a Box's bound, as one value if all elements are equal."""
    if bound.size > 1 and bool((bound == bound.flat[0]).all()):
        bound = np.asarray(bound.flat[0])
    encoded: dict[str, Any] = to_plain(np.asarray(bound))
    return encoded


def space_from_plain(plain: Any) -> gym.Space[Any] | None:
    """Return the space that `space_to_plain` converted.

    Raises:
        ValueError: If the value is no space's plain form.
    """
    try:
        return _decode(plain, 0)
    except (ValueError, KeyError, TypeError, AssertionError, OverflowError, AttributeError) as error:
        raise ValueError(f"expected a space's plain form, got {str(plain)[:200]}: {error!r}.") from error


def _decode_present(plain: Any, depth: int) -> gym.Space[Any]:
    space = _decode(plain, depth)
    if space is None:
        raise ValueError("expected a space inside of a space, got None.")
    return space


def _decode(plain: Any, depth: int) -> gym.Space[Any] | None:
    if plain is None:
        return None
    if depth > _MAX_DEPTH:
        raise ValueError(f"expected spaces nested at most {_MAX_DEPTH} deep.")
    kind = plain["kind"]
    if kind == "box":
        shape, dtype = tuple(plain["shape"]), checked_dtype(plain["dtype"])
        if math.prod(shape) > _MAX_ELEMENTS:
            raise ValueError(f"expected a Box of at most {_MAX_ELEMENTS} elements, got shape {shape}.")
        low, high = from_plain(plain["low"]), from_plain(plain["high"])
        fits = all(bound.size == 1 or bound.shape == shape for bound in (low, high))
        if dtype.kind not in "biuf" or not fits:
            raise ValueError(f"expected a Box's bounds of shape {shape}, got {low.shape} and {high.shape}.")
        if low.size == 1:
            low = np.broadcast_to(low.reshape(()), shape)
        if high.size == 1:
            high = np.broadcast_to(high.reshape(()), shape)
        return spaces.Box(np.array(low), np.array(high), shape, dtype.type)
    if kind == "discrete":
        return spaces.Discrete(plain["n"], start=plain["start"], dtype=checked_dtype(plain["dtype"]).type)
    if kind == "multi_discrete":
        nvec, start = from_plain(plain["nvec"]), from_plain(plain["start"])
        return spaces.MultiDiscrete(nvec, dtype=checked_dtype(plain["dtype"]).type, start=start)
    if kind == "multi_binary":
        shape = plain["shape"]
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if kind == "dict":
        return spaces.Dict({key: _decode_present(sub, depth + 1) for key, sub in plain["spaces"]})
    if kind in ("tuple", "one_of"):
        parts = [_decode_present(sub, depth + 1) for sub in plain["spaces"]]
        return spaces.Tuple(parts) if kind == "tuple" else spaces.OneOf(parts)
    if kind == "sequence":
        return spaces.Sequence(_decode_present(plain["space"], depth + 1), stack=plain["stack"])
    if kind == "text":
        return spaces.Text(plain["max"], min_length=plain["min"], charset=plain["charset"])
    if kind == "graph":
        node, edge = _decode(plain["node"], depth + 1), _decode(plain["edge"], depth + 1)
        return spaces.Graph(node, edge)  # type: ignore[arg-type]
    raise ValueError(f"expected a known kind of space, got {kind!r}.")
