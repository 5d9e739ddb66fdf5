"""Copies of setting values: containers are copied, their contents are shared."""

from __future__ import annotations

import copy
from typing import Any

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.config.plain import CONFIG_TAG, MULTI_SPEC_TAG, SPEC_TAG

__all__ = ["copy_value"]


def copy_value(value: Any) -> Any:
    """Return a copy of containers, module specs and configs; spaces, classes and functions in them are shared."""
    if value is None or isinstance(value, str | int | float | type):
        return value
    if isinstance(value, dict):
        return {key: copy_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_value(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_value(item) for item in value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, DefaultModelConfig):
        return copy.deepcopy(value)
    tag = getattr(value, "plain_tag", None)
    if tag == CONFIG_TAG:
        return value.copy()
    if tag in (SPEC_TAG, MULTI_SPEC_TAG):
        new = copy.copy(value)
        vars(new).update({name: copy_value(item) for name, item in vars(value).items()})
        return new
    return value
