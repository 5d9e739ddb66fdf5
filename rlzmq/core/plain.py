"""Conversion of numpy and Python data to plain values, which msgpack can pack, and back.

`to_plain` and `from_plain` are each other's inverse, types included (tuples stay tuples, numpy scalars numpy
scalars). Nothing but this fixed set of types is ever made from plain values, so they are safe to read from
files and peers.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

__all__ = ["NotPlainError", "checked_dtype", "from_plain", "to_plain"]

# The key that marks a dict as an encoded value of a type that msgpack lacks.
_TAG = "__type__"
_MAX_DEPTH = 64
_INT64 = range(-(2**63), 2**64)
_DTYPE = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f[248]|c(?:8|16)|[SU][1-9][0-9]{0,5}|[mM]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?)"
)
_known_dtypes: dict[str, np.dtype[Any]] = {}


class NotPlainError(TypeError):
    """Raised for a value without a plain form; the message names its path and type."""


def checked_dtype(text: object) -> np.dtype[Any]:
    """Return the numpy dtype of a ``dtype.str`` from outside: bool, numbers, datetimes, fixed-size strings only.

    Raises:
        ValueError: For anything else (objects, records, raw bytes, or no string at all).
    """
    known = _known_dtypes.get(text) if isinstance(text, str) else None
    if known is not None:
        return known
    if not isinstance(text, str) or len(text) > 32 or not _DTYPE.fullmatch(text):
        raise ValueError(
            f"expected the dtype of a bool, number, datetime or fixed-size string, got {str(text)[:64]!r}."
        )
    try:
        dtype = np.dtype(text)
    except TypeError as error:
        raise ValueError(f"expected a numpy dtype, got {text!r}: {error}.") from None
    if len(_known_dtypes) < 256:
        _known_dtypes[text] = dtype
    return dtype


def to_plain(value: Any, where: str = "value") -> Any:
    """Return the plain form of ``value``.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict (any keys of these types), numpy
            scalars and arrays (no object dtype), nested in any way up to 64 deep.
        where: Name of the value in error messages.

    Raises:
        NotPlainError: For any other type; the message names its path.
    """
    return _encode(value, where, 0)


def _encode(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float or kind is bytes:
        return value
    if kind is int:
        return value if value in _INT64 else {_TAG: "int", "digits": str(value)}
    if depth > _MAX_DEPTH:
        raise NotPlainError(f"{where}: nested more than {_MAX_DEPTH} deep.")
    if kind is list:
        return [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, np.ndarray):
        return _encode_array(value, where)
    if isinstance(value, np.generic):
        array = np.asarray(value)
        return {**_encode_array(array, where), _TAG: "scalar"}
    if isinstance(value, dict):
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: _encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        items = [
            [_encode(key, f"{where} key", depth + 1), _encode(item, f"{where}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "items": items}
    if kind is tuple:
        items = [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return {_TAG: "tuple", "items": items}
    if kind is complex:
        return {_TAG: "complex", "parts": [value.real, value.imag]}
    raise NotPlainError(
        f"{where}: expected None, bool, number, str, bytes, list, tuple, dict or a numpy array of numbers, "
        f"got {kind.__module__}.{kind.__qualname__}."
    )


def _encode_array(array: np.ndarray, where: str) -> dict[str, Any]:
    if array.dtype.kind not in "biufcmMSU":
        raise NotPlainError(f"{where}: expected an array of numbers or strings, got dtype {array.dtype}.")
    return {_TAG: "array", "dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def from_plain(value: Any) -> Any:
    """Return the value that `to_plain` was given.

    Raises:
        ValueError: If the value is no plain form (unknown tag, wrong size or dtype, too deep).
    """
    return _decode(value, 0)


def _decode(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is not dict and kind is not list:
        if value is None or kind in (bool, int, float, str, bytes):
            return value
        raise ValueError(f"expected a plain value, got {kind.__qualname__}.")
    if depth > 2 * _MAX_DEPTH + 2:
        raise ValueError(f"expected values nested at most {_MAX_DEPTH} deep, got deeper ones.")
    if kind is list:
        return [_decode(item, depth + 1) for item in value]
    tag = value.get(_TAG)
    if tag is None:
        return {key: _decode(item, depth + 1) for key, item in value.items()}
    try:
        return _decode_tagged(tag, value, depth)
    except (KeyError, TypeError, OverflowError) as error:
        fields = sorted(map(str, value))
        raise ValueError(f"expected the fields of a tagged {tag!r}, got {fields}.") from error


def _decode_tagged(tag: object, value: dict[str, Any], depth: int) -> Any:
    if tag in ("array", "scalar"):
        return _decode_array(value, scalar=tag == "scalar")
    if tag == "tuple":
        return tuple(_decode(item, depth + 1) for item in _expect_list(value["items"]))
    if tag == "dict":
        pairs = [_expect_list(pair) for pair in _expect_list(value["items"])]
        return {_decode(key, depth + 1): _decode(item, depth + 1) for key, item in pairs}
    if tag == "int":
        digits = value["digits"]
        if not isinstance(digits, str) or len(digits) > 1000:
            raise ValueError("expected an integer of at most 1000 digits.")
        return int(digits)
    if tag == "complex":
        real, imag = value["parts"]
        return complex(real, imag)
    raise ValueError(f"expected a known tag (array, scalar, tuple, dict, int, complex), got {tag!r}.")


def _expect_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"expected a list, got {type(value).__qualname__}.")
    return value


def _decode_array(value: dict[str, Any], *, scalar: bool) -> Any:
    dtype, shape, data = checked_dtype(value["dtype"]), _expect_list(value["shape"]), value["data"]
    if len(shape) > 32 or any(type(size) is not int or not 0 <= size < 2**48 for size in shape):
        raise ValueError(f"expected a shape of at most 32 sizes from 0, got {str(shape)[:200]}.")
    expected = math.prod(shape) * dtype.itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        actual = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__qualname__
        raise ValueError(f"expected {expected} bytes for shape {shape} of {dtype}, got {actual}.")
    if dtype.kind == "b" and data.strip(b"\x00\x01"):
        raise ValueError("expected bools of 0 or 1, got other bytes.")
    if scalar:
        if shape:
            raise ValueError(f"expected a scalar, got shape {shape}.")
        return np.frombuffer(data, dtype)[0]
    if expected == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()
