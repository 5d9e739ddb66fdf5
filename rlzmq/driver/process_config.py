"""Configs sent to other processes, with only those callbacks that are called there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlzmq.actors import by_value
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.callbacks import RUNNER_HOOKS, hooks_of
from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.registry import registration_of

__all__ = ["config_for_learners", "config_for_runners"]


def config_for_runners(config: BaseConfig) -> BaseConfig:
    """Return a config for env runners, without the driver's callbacks and the files and locks they may hold.

    Raises:
        ConfigurationError: A callback with hooks for runners cannot be sent to their processes.
    """
    sent = _with_hooks(config, RUNNER_HOOKS)
    for item in _listed(sent.callbacks_class):
        _check_can_be_sent(
            item, f"{getattr(item, '__name__', type(item).__name__)} ({_names(hooks_of(item))})"
        )
    for name, functions in sent.callbacks_hooks.items():
        for function in functions:
            _check_can_be_sent(function, f"{name}={function!r}")
    return _sendable(sent)


def config_for_learners(config: BaseConfig) -> BaseConfig:
    """Return a config for learners, without callbacks."""
    return _sendable(_with_hooks(config, ()))


def _sendable(config: BaseConfig) -> BaseConfig:
    """Return the config; raise a ConfigurationError that names the setting which other processes cannot get."""
    try:
        by_value.dumps(config, "it")
    except TypeError as error:
        for name, value in {**config.to_dict(), "env": (config.env, registration_of(config.env))}.items():
            try:
                by_value.dumps(value, "it")
            except TypeError as reason:
                raise ConfigurationError(
                    f"config.{config._fields[name].group}({name}=…) cannot be sent to the run's other processes: "
                    f"{reason.__cause__ or reason}. Create locks, files, sockets and envs inside the function or "
                    "class that you set, or import them there."
                ) from None
        raise error
    return config


def _with_hooks(config: BaseConfig, names: Collection[str]) -> BaseConfig:
    classes = _listed(config.callbacks_class)
    kept = [item for item in classes if set(names) & set(hooks_of(item))]
    hooks = {name: functions for name, functions in config.callbacks_hooks.items() if name in names}
    if len(kept) == len(classes) and len(hooks) == len(config.callbacks_hooks):
        return config
    new = config.copy(copy_frozen=False)
    new.callbacks_class = kept or None
    new.callbacks_hooks = hooks
    if config.is_frozen:
        new.freeze()
    return new


def _listed(classes: object) -> list[Any]:
    if classes is None:
        return []
    return list(classes) if isinstance(classes, list | tuple) else [classes]


def _check_can_be_sent(item: object, what: str) -> None:
    try:
        by_value.dumps(item, "it")
    except TypeError as error:
        raise ConfigurationError(
            f"callbacks: {what} runs in the env runners' processes, but cannot be sent there: "
            f"{error.__cause__ or error}. Create what cannot be sent (files, writers, locks) in a hook, on first "
            "use; or put the hooks that run in this process (on_train_result, …) into a separate class."
        ) from None


def _names(hooks: list[str]) -> str:
    return ", ".join(name for name in hooks if name in RUNNER_HOOKS)
