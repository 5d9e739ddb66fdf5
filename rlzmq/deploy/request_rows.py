"""Rows of requests: observations, states and rewards, as arrays for a forward pass.

Requests of several clients share a forward pass, so they are checked first: structure, shape and dtype of each on its
arrival (`fitting_rows`, `fitting_values`); then, for all rows of the forward pass at once, that numbers are finite and
discrete values, which modules use as indices, in their range (`check_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlzmq.core.printable import cut
from rlzmq.deploy.policy_graph import Port

__all__ = [
    "RequestError",
    "check_finite",
    "check_rows",
    "fitting_rows",
    "fitting_values",
    "rows_from_json",
    "values_from_json",
]

_Array = npt.NDArray[Any]
_SPACE_BYTES = 200  # the bounds of images are long


class RequestError(ValueError):
    """A request that does not fit the policy. The text describes what is expected."""


def rows_from_json(space: gym.Space[Any], values: Sequence[Any], where: str) -> list[_Array]:
    """Return values of a space as arrays ``[N, ...]``, one for each leaf of the space.

    Args:
        space: The space; a Dict's value is an object, a Tuple's a list.
        values: N values as `json.loads` returns them.
        where: Name of the values in error messages.

    Raises:
        RequestError: A value is not in the space.
    """
    if isinstance(space, gym.spaces.Dict):
        keys = sorted(space.spaces)
        for value in values:
            if not isinstance(value, dict) or sorted(value) != keys:
                got = f"the keys {sorted(value)}" if isinstance(value, dict) else _kind(value)
                raise RequestError(f"{where}: expected an object with the keys {keys}, got {got:.200}")
        parts = [(f"{where}.{key}", space.spaces[key], [value[key] for value in values]) for key in keys]
    elif isinstance(space, gym.spaces.Tuple):
        for value in values:
            if not isinstance(value, list) or len(value) != len(space.spaces):
                got = f"a list of {len(value)}" if isinstance(value, list) else _kind(value)
                raise RequestError(f"{where}: expected a list of {len(space.spaces)} parts, got {got}")
        parts = [
            (f"{where}.{index}", part, [value[index] for value in values])
            for index, part in enumerate(space.spaces)
        ]
    else:
        return [_checked_rows(space, _numbers(values, where), where)]
    return [leaf for name, part, own in parts for leaf in rows_from_json(part, own, name)]


def values_from_json(ports: Sequence[Port], values: Any, num_rows: int, where: str) -> list[_Array]:
    """Return the arrays of ports, from a dict of a port's name (without its first part) to N JSON values.

    Raises:
        RequestError: A port is missing or unknown, or its value has the wrong shape.
    """
    names = [port.name.partition(".")[2] for port in ports]
    if not isinstance(values, Mapping) or sorted(values) != sorted(names):
        got = f"the keys {sorted(values)}" if isinstance(values, Mapping) else _kind(values)
        raise RequestError(f"{where}: expected an object with the keys {sorted(names)}, got {got:.200}")
    found = []
    for name, port in zip(names, ports, strict=True):
        if not isinstance(values[name], list):
            raise RequestError(f"{where}.{name}: expected a list, got {_kind(values[name])}")
        found.append(
            fitting_values(port, _numbers(values[name], f"{where}.{name}"), num_rows, f"{where}.{name}")
        )
    return found


def _checked_rows(space: gym.Space[Any], array: _Array, where: str) -> _Array:
    array = fitting_rows(space, array, where)
    check_rows(space, array, where)
    return array


def fitting_rows(space: gym.Space[Any], array: _Array, where: str) -> _Array:
    """Return N values of a space without parts, in the space's dtype. Their values are not checked.

    Args:
        space: Box, Discrete, MultiDiscrete or MultiBinary.
        array: ``[N, ...]`` of any numbers.
        where: Name of the array in error messages.

    Raises:
        RequestError: The shape or dtype is wrong.
    """
    shape = tuple(space.shape or ())
    if array.ndim == 0 or array.shape[1:] != shape:
        raise RequestError(
            f"{where}: expected shape {shape}, got {array.shape[1:]}; the space is {_shown(space)}"
        )
    assert space.dtype is not None
    return _as_dtype(array, space.dtype, where)


def check_rows(space: gym.Space[Any], array: _Array, where: str) -> None:
    """Check the values of an array from `fitting_rows`.

    Raises:
        RequestError: A number is not finite, or a discrete value is out of range.
    """
    check_finite(array, where)
    if isinstance(space, gym.spaces.Discrete):
        _check_range(array, space.start, space.start + space.n - 1, space, where)
    elif isinstance(space, gym.spaces.MultiDiscrete):
        _check_range(array, space.start, space.start + space.nvec - 1, space, where)
    elif isinstance(space, gym.spaces.MultiBinary):
        _check_range(array, 0, 1, space, where)


def check_finite(array: _Array, where: str) -> None:
    """Raise a RequestError if a number is not finite."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(f"{where}: expected finite numbers of dtype {array.dtype}")


def fitting_values(port: Port, array: _Array, num_rows: int, where: str) -> _Array:
    """Return a port's array ``[N, ...]``, converted to its dtype.

    Raises:
        RequestError: The shape or dtype is wrong.
    """
    if array.shape != (num_rows, *port.shape):
        raise RequestError(f"{where}: expected shape {(num_rows, *port.shape)}, got {array.shape}")
    return _as_dtype(array, port.dtype, where)


def _as_dtype(array: _Array, dtype: np.dtype[Any], where: str) -> _Array:
    """Return the same numbers in another dtype."""
    if array.dtype != dtype:
        if array.dtype.kind not in "biuf":
            raise RequestError(f"{where}: expected numbers of dtype {dtype}, got {array.dtype}")
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                array = array.astype(dtype)
        else:
            _check_fits(array, dtype, where)
            array = array.astype(dtype)
    return array


def _check_fits(array: _Array, dtype: np.dtype[Any], where: str) -> None:
    if not array.size:
        return
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
        raise RequestError(f"{where}: expected whole numbers of dtype {dtype}, got {array.dtype}")
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if array.min() < low or array.max() > high:
        raise RequestError(f"{where}: expected numbers from {low} to {high} (dtype {dtype})")


def _check_range(array: _Array, low: Any, high: Any, space: gym.Space[Any], where: str) -> None:
    if not ((array >= low) & (array <= high)).all():
        raise RequestError(f"{where}: a value is outside of {_shown(space)}")


def _shown(space: gym.Space[Any]) -> str:
    return cut(" ".join(str(space).split()), _SPACE_BYTES)


def _numbers(values: Sequence[Any], where: str) -> _Array:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise RequestError(f"{where}: expected numbers, got lists of different lengths") from None
    if array.dtype.kind not in "biuf" or not len(array):
        raise RequestError(f"{where}: expected numbers, got something else")
    return array


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
