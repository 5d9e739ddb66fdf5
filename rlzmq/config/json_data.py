"""Setting values as JSON data, for logs and databases; other objects become their name, source or repr."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["to_json"]


def to_json(value: Any) -> Any:
    """Return a value as nested None, bool, number, text, list or dict. Never fails; cannot be read back."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return [to_json(item) for item in sorted(value, key=repr)]
    if hasattr(value, "serialize") and not isinstance(value, type):  # an evaluation_config
        return value.serialize()
    qualname = getattr(value, "__qualname__", None)
    if not callable(value) or qualname is None:
        return repr(value)
    if "<" not in qualname:
        return f"{value.__module__}.{qualname}"
    try:
        return textwrap.dedent(inspect.getsource(value)).strip()
    except (OSError, TypeError):  # typed at a prompt, or without source
        return f"{value.__module__}.{qualname}"
