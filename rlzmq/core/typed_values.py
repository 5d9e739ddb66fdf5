"""Nested values with their types, as plain values and arrays that checkpoints and actor calls carry."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlzmq.core.plain import NotPlainError

__all__ = ["freeze", "freeze_known", "thaw"]

# Containers and whatever else would not come back as it was are dicts with one of these keys first.
_DICT, _LIST, _TUPLE, _SCALAR, _TENSOR = "dict", "list", "tuple", "scalar", "tensor"


def freeze(value: Any, where: str = "value") -> Any:
    """What `thaw` makes an equal value of: arrays are copied, and stay arrays.

    Args:
        value: None, bool, int, float, str, bytes, numpy scalars, arrays and tensors of numbers, in any nesting of
            dicts, lists and tuples.
        where: What the value is called in an error's text.

    Raises:
        NotPlainError: For any other type, naming the path to it.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise NotPlainError(f"{where}: expected an array of numbers, got dtype {value.dtype}.")
        return value.copy()
    if isinstance(value, np.generic):
        return {_SCALAR: freeze(np.atleast_1d(np.asarray(value)), where)}
    if hasattr(value, "detach"):  # a torch tensor
        if str(value.dtype) == "torch.bfloat16":
            raise NotPlainError(f"{where}: a bfloat16 tensor has no plain form.")
        return {_TENSOR: value.detach().cpu().numpy().copy(), "device": str(value.device)}
    if isinstance(value, Mapping):
        pairs = [[freeze(k, f"{where} key"), freeze(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_DICT: pairs}
    if isinstance(value, list | tuple):
        items = [freeze(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {_LIST if isinstance(value, list) else _TUPLE: items}
    kind = type(value)
    raise NotPlainError(
        f"{where}: expected numbers, strings, arrays or tensors in dicts, lists and tuples, got "
        f"{kind.__module__}.{kind.__qualname__}."
    )


def freeze_known(values: Mapping[str, Any]) -> Any:
    """A dict frozen, without the items that cannot be: objects of the user's own."""
    kept = {}
    for key, value in values.items():
        with contextlib.suppress(NotPlainError):
            freeze(value)
            kept[key] = value
    return freeze(kept)


def thaw(frozen: Any) -> Any:
    """What `freeze` was given, in memory of its own.

    Raises:
        ValueError: No such value.
    """
    if isinstance(frozen, np.ndarray):
        return np.array(frozen)
    if not isinstance(frozen, Mapping):
        return frozen
    kind, content = next(iter(frozen.items()))
    if kind == _DICT:
        return {thaw(key): thaw(item) for key, item in content}
    if kind == _LIST:
        return [thaw(item) for item in content]
    if kind == _TUPLE:
        return tuple(thaw(item) for item in content)
    if kind == _SCALAR:
        return np.asarray(content)[0]
    if kind == _TENSOR:
        import torch

        return torch.from_numpy(np.array(content)).to(frozen["device"])
    raise ValueError(f"expected a frozen value, got a dict with the key {kind!r}.")
