"""Encoding of nested values with their types as plain values and arrays, for checkpoints and actor calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlzmq.core.plain import NotPlainError

__all__ = ["decode", "encode", "encode_supported"]

# Containers and other types to restore exactly are dicts with one of these keys first.
_DICT, _LIST, _TUPLE, _SCALAR, _TENSOR = "dict", "list", "tuple", "scalar", "tensor"


def encode(value: Any, where: str = "value") -> Any:
    """Encode a value for `decode`; arrays are copied and stay arrays.

    Args:
        value: None, bool, int, float, str, bytes, numpy scalars, arrays and tensors of numbers, in any nesting of
            dicts, lists and tuples.
        where: Name of the value in error messages.

    Raises:
        NotPlainError: For any other type; the message names its path.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise NotPlainError(f"{where}: expected an array of numbers, got dtype {value.dtype}.")
        return value.copy()
    if isinstance(value, np.generic):
        return {_SCALAR: encode(np.atleast_1d(np.asarray(value)), where)}
    if hasattr(value, "detach"):  # a torch tensor
        if str(value.dtype) == "torch.bfloat16":
            raise NotPlainError(f"{where}: a bfloat16 tensor has no plain form.")
        return {_TENSOR: value.detach().cpu().numpy().copy(), "device": str(value.device)}
    if isinstance(value, Mapping):
        pairs = [[encode(k, f"{where} key"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_DICT: pairs}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {_LIST if isinstance(value, list) else _TUPLE: items}
    kind = type(value)
    raise NotPlainError(
        f"{where}: expected numbers, strings, arrays or tensors in dicts, lists and tuples, got "
        f"{kind.__module__}.{kind.__qualname__}."
    )


def encode_supported(values: Mapping[str, Any]) -> Any:
    """Encode a dict without its unsupported items, e.g. user objects."""
    kept = {}
    for key, value in values.items():
        with contextlib.suppress(NotPlainError):
            encode(value)
            kept[key] = value
    return encode(kept)


def decode(encoded: Any) -> Any:
    """Return the value that `encode` was given, in new memory.

    Raises:
        ValueError: If the value was not encoded by `encode`.
    """
    if isinstance(encoded, np.ndarray):
        return np.array(encoded)
    if not isinstance(encoded, Mapping):
        return encoded
    kind, content = next(iter(encoded.items()))
    if kind == _DICT:
        return {decode(key): decode(item) for key, item in content}
    if kind == _LIST:
        return [decode(item) for item in content]
    if kind == _TUPLE:
        return tuple(decode(item) for item in content)
    if kind == _SCALAR:
        return np.asarray(content)[0]
    if kind == _TENSOR:
        import torch

        return torch.from_numpy(np.array(content)).to(encoded["device"])
    raise ValueError(f"expected an encoded value, got a dict with the key {kind!r}.")
