"""Access to metrics of nested results by slash path, and checks of the comparison mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from rlzmq.core.errors import ConfigurationError

__all__ = ["Mode", "check_mode", "flatten", "number_at", "value_at"]

Mode = Literal["min", "max"]


def check_mode(mode: object, where: str) -> None:
    """Check that `mode` is "min", "max" or None.

    Raises:
        ConfigurationError: It is something else.
    """
    if mode not in ("min", "max", None):
        raise ConfigurationError(f"{where}(mode={mode!r}): expected 'min' or 'max'.")


def value_at(result: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path such as ``"env_runners/episode_return_mean"``; None if the result lacks it."""
    value: Any = result
    for key in path.split("/"):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def number_at(result: Mapping[str, Any], path: str) -> float | None:
    """Return the finite number at a path; None if there is none."""
    value = value_at(result, path)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None


def flatten(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested result as a flat dict of slash paths."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat
