"""Reads and sets values of a trial's config by slash path, and replaces its search objects by values."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlzmq.config.base_config import BaseConfig
from rlzmq.config.search_space import Function, SearchObject, replace_search_objects
from rlzmq.core.errors import ConfigurationError

__all__ = ["TrialConfig", "config_value", "resolve", "with_values"]

TrialConfig = BaseConfig | dict[str, Any]
"""A trial's config: an algorithm's config, or a dict."""


def config_value(config: TrialConfig, path: str) -> Any:
    """Return the value at a path such as ``"lr"`` or ``"env_config/size"``.

    Raises:
        ConfigurationError: The config has no such path.
    """
    value: Any = config
    for key in path.split("/"):
        try:
            value = value[int(key)] if isinstance(value, list | tuple) else _item(value, key)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            raise ConfigurationError(f"The trial's config has no {path!r}.") from None
    return value


def with_values(config: TrialConfig, changes: Mapping[str, Any]) -> TrialConfig:
    """Return a copy of the config with some values replaced, given by path.

    Raises:
        ConfigurationError: The config has no such path, or a value is invalid.
    """
    for path, value in changes.items():
        config_value(config, path)
        config = _with(config, path.split("/"), value)
    return config


def resolve(
    param_space: TrialConfig, space: Mapping[str, SearchObject], chosen: Mapping[str, Any], seed: int
) -> TrialConfig:
    """Return a trial's config: `param_space` with a value in place of each search object.

    Args:
        param_space: A config or dict with search objects.
        space: Its search objects by path.
        chosen: The values of all search objects by path, except those that are functions.
        seed: Seed of Python's and numpy's global generators while functions are called.

    Raises:
        ConfigurationError: A value is invalid for its setting.
    """
    config: TrialConfig = replace_search_objects(param_space, chosen)
    states = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        for path, item in space.items():
            if isinstance(item, Function):
                spec = SimpleNamespace(
                    config=config if isinstance(config, BaseConfig) else _AttributeDict(config)
                )
                config = replace_search_objects(config, {path: item.value_of(spec)})
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return config


class _AttributeDict(dict[str, Any]):
    """A dict whose items are attributes as well, at every depth."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return _AttributeDict(value) if type(value) is dict else value


def _item(value: object, key: str) -> Any:
    return value[key] if isinstance(value, Mapping | BaseConfig) else getattr(value, key)


def _with(node: object, keys: list[str], value: object) -> Any:
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, BaseConfig):
        return node.copy(copy_frozen=False).update_from_dict({key: _with(node[key], rest, value)})
    if isinstance(node, Mapping):
        return {**node, key: _with(node[key], rest, value)}
    if isinstance(node, list | tuple):
        items = list(node)
        items[int(key)] = _with(items[int(key)], rest, value)
        return type(node)(items)
    new = copy.copy(node)
    setattr(new, key, _with(getattr(node, key), rest, value))
    return new
