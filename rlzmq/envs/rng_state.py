"""States of the random number generators of environments and spaces, as plain values."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

__all__ = [
    "get_random_states",
    "plain_random",
    "random_state",
    "set_random_state",
    "set_random_states",
    "set_space_random_state",
    "space_random_state",
]

# Limits of the search for generators; objects beyond them are ignored.
_MAX_OBJECTS = 2_000
_MAX_DEPTH = 8
_LONGEST_CONTAINER = 256

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_NOTHING_INSIDE = (
    *(str, bytes, bool, int, float, complex, type(None), np.ndarray, np.generic, type),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)
# The acting code may sample from these, so they are not the environment's.
_NOT_THE_ENVS = frozenset({"action_space", "action_spaces"})
_LAZY = "_np_random"  # Gymnasium's environments and spaces create it on first use


# -- one generator ----------------------------------------------------------------------------------


def random_state(env: Any) -> dict[str, Any] | None:
    """Return the state of an environment's ``np_random``; None if it has not used or been given one."""
    generator = getattr(getattr(env, "unwrapped", env), "_np_random", None)
    return None if generator is None else _plain_state(generator)


def set_random_state(env: Any, state: Mapping[str, Any] | None) -> None:
    """Set the state of an environment's ``np_random``.

    Raises:
        ValueError: The environment has another kind of generator.
    """
    if state is not None:
        env.unwrapped.np_random.bit_generator.state = _numpy_state(state)


def space_random_state(space: Any) -> list[Any]:
    """Return the random states of a space and its parts."""
    generator = getattr(space, "_np_random", None)
    state = None if generator is None else _plain_state(generator)
    return [state, *(space_random_state(part) for part in _parts(space))]


def set_space_random_state(space: Any, state: Sequence[Any]) -> None:
    """Set the random states of a space and its parts. Does nothing for another kind of space."""
    parts = _parts(space)
    if len(parts) != len(state) - 1:
        return
    if state[0] is not None:
        space.np_random.bit_generator.state = _numpy_state(state[0])
    for part, of_part in zip(parts, state[1:], strict=True):
        set_space_random_state(part, of_part)


def _parts(space: Any) -> list[Any]:
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return list(space.spaces) if isinstance(space, spaces.Tuple) else []


def _plain_state(generator: Any) -> dict[str, Any]:
    """Return a bit generator's state with arrays as lists, so that it can be compared and printed."""
    plain: dict[str, Any] = plain_random(generator.bit_generator.state)
    return plain


def plain_random(value: Any) -> Any:
    """Return a bit generator's state without arrays."""
    if isinstance(value, Mapping):
        return {key: plain_random(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def _numpy_state(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {"dtype", "values"}:
            array: NDArray[Any] = np.array(value["values"], value["dtype"])
            return array
        return {key: _numpy_state(item) for key, item in value.items()}
    return value


# -- all generators that an object holds -------------------------------------------------------------


def get_random_states(env: Any) -> dict[str, Any]:
    """Return the states of all generators in an environment's attributes, recursively, and in lists and dicts.

    Generators of action spaces are left out.

    Returns:
        Path -> plain values.
    """
    return {path: _state(found) for path, found, _ in _generators(env) if found is not None}


def set_random_states(env: Any, state: Mapping[str, Any]) -> None:
    """Set the states of an environment's generators, by path.

    Raises:
        ValueError: A generator is missing or of another kind.
    """
    places = {path: (found, owner) for path, found, owner in _generators(env)}
    for path, of_generator in state.items():
        if path not in places:
            raise ValueError(f"it has no random number generator {path!r}")
        found, owner = places[path]
        _set_state(owner.np_random if found is None else found, of_generator, path)


def _generators(env: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, generator or None, owner) of each generator once, breadth first."""
    seen = {id(env)}
    waiting: deque[tuple[str, Any, int]] = deque([("", env, 0)])
    while waiting:
        path, holder, depth = waiting.popleft()
        for name, value in _contents(holder):
            where = f"{path}/{name}"
            if value is None and name == _LAZY and hasattr(type(holder), "np_random"):
                yield where, None, holder
            elif isinstance(value, _NOTHING_INSIDE) or id(value) in seen:
                continue
            elif isinstance(value, _GENERATORS):
                seen.add(id(value))
                yield where, value, holder
            elif depth < _MAX_DEPTH and len(seen) < _MAX_OBJECTS:
                seen.add(id(value))
                waiting.append((where, value, depth + 1))


def _contents(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, dict):
        if len(holder) <= _LONGEST_CONTAINER:
            yield from ((repr(key), value) for key, value in holder.items())
    elif isinstance(holder, list | tuple | deque):
        if len(holder) <= _LONGEST_CONTAINER:
            yield from enumerate(holder)
    else:
        attributes = getattr(holder, "__dict__", {})
        yield from (item for item in attributes.items() if item[0] not in _NOT_THE_ENVS)
        if _LAZY not in attributes and hasattr(type(holder), _LAZY):
            yield _LAZY, None


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        version, internal, gauss = generator.getstate()
        return {"python": [version, list(internal), gauss]}
    if isinstance(generator, np.random.RandomState):
        return {"legacy": plain_random(generator.get_state(legacy=False))}
    return _plain_state(generator)


def _set_state(generator: Any, state: Mapping[str, Any], path: str) -> None:
    if "python" in state:
        _check_kind(generator, random.Random, path)
        version, internal, gauss = state["python"]
        generator.setstate((version, tuple(internal), gauss))
    elif "legacy" in state:
        _check_kind(generator, np.random.RandomState, path)
        generator.set_state(_numpy_state(state["legacy"]))
    else:
        _check_kind(generator, np.random.Generator, path)
        generator.bit_generator.state = _numpy_state(state)


def _check_kind(generator: Any, expected: type, path: str) -> None:
    if not isinstance(generator, expected):
        raise ValueError(
            f"expected a {expected.__name__} as random number generator {path!r}, got "
            f"{type(generator).__name__}"
        )
