"""Conversion of gymnasium's own spaces to plain values and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlzmq.wire.errors import MalformedFrameError

__all__ = ["SPACE_NAMES", "pack_space", "unpack_space"]

SPACE_NAMES = frozenset(
    {"Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "Dict", "Tuple", "Sequence", "Graph", "OneOf"}
)


def pack_space(space: Any) -> list[Any] | None:
    """Return ``[class name, parts…]``, or None if it is not one of gymnasium's own space classes."""
    from gymnasium import spaces

    name = type(space).__name__
    if type(space) is not getattr(spaces, name, None):
        return None
    if name == "Box":
        return [name, space.low, space.high, space.dtype.str]
    if name == "Discrete":
        return [name, int(space.n), int(space.start), space.dtype.str]
    if name == "MultiDiscrete":
        return [name, space.nvec, space.start, space.dtype.str]
    if name == "MultiBinary":
        return [name, list(space.n) if isinstance(space.n, tuple) else int(space.n)]
    if name == "Text":
        return [name, int(space.min_length), int(space.max_length), "".join(space.character_list)]
    if name == "Dict":
        return [name, dict(space.spaces)]
    if name in ("Tuple", "OneOf"):
        return [name, list(space.spaces)]
    if name == "Sequence":
        return [name, space.feature_space, bool(space.stack)]
    return [name, space.node_space, space.edge_space]


def unpack_space(parts: Any) -> Any:
    """Return the space packed by `pack_space`.

    Raises:
        MalformedFrameError: The space's constructor refuses the parts.
    """
    from gymnasium import spaces

    if not isinstance(parts, list) or not parts or parts[0] not in SPACE_NAMES:
        raise MalformedFrameError("a packed space is [class name, parts…]")
    name, *rest = parts
    try:
        if name == "Box":
            low, high, dtype = rest
            return spaces.Box(low, high, dtype=_dtype(dtype))
        if name == "Discrete":
            n, start, dtype = rest
            return spaces.Discrete(n, start=start, dtype=_dtype(dtype))
        if name == "MultiDiscrete":
            nvec, start, dtype = rest
            return spaces.MultiDiscrete(nvec, dtype=_dtype(dtype), start=start)
        if name == "MultiBinary":
            (n,) = rest
            return spaces.MultiBinary(n)
        if name == "Text":
            min_length, max_length, charset = rest
            return spaces.Text(max_length, min_length=min_length, charset=charset)
        if name in ("Dict", "Tuple", "OneOf"):
            (children,) = rest
            return getattr(spaces, name)(children)
        if name == "Sequence":
            feature_space, stack = rest
            return spaces.Sequence(feature_space, stack=stack)
        node_space, edge_space = rest
        return spaces.Graph(node_space, edge_space)
    except (TypeError, ValueError, AssertionError, OverflowError, IndexError) as error:
        raise MalformedFrameError(
            f"a packed {name} space whose parts do not fit ({type(error).__name__})"
        ) from None


def _dtype(text: Any) -> Any:
    if not isinstance(text, str) or text[1:] not in _DTYPES or text[0] not in "<|":
        raise TypeError("a space's dtype is a number type")
    return np.dtype(text)


_DTYPES = frozenset(["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
