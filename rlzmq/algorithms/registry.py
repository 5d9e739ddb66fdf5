"""The algorithms by name, for the command line and for checkpoints."""

from __future__ import annotations

import importlib
from typing import Any

from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["ALGORITHMS", "algorithm_of", "config_class_named", "get_config_class", "name_of_config"]

ALGORITHMS: dict[str, str] = {
    "appo": "rlzmq.algorithms.appo:APPOConfig",
    "impala": "rlzmq.algorithms.impala:IMPALAConfig",
    "ppo": "rlzmq.algorithms.ppo:PPOConfig",
}


def get_config_class(algorithm: str) -> Any:
    """The config class of an algorithm's name, e.g. ``"ppo"`` (upper or lower case).

    Raises:
        ConfigurationError: There is no such algorithm.
    """
    try:
        module, _, name = ALGORITHMS[algorithm.lower()].partition(":")
    except KeyError:
        raise ConfigurationError(
            f"No algorithm {algorithm!r}.{did_you_mean(algorithm, ALGORITHMS)}"
        ) from None
    return getattr(importlib.import_module(module), name)


def algorithm_of(config_class: type) -> str:
    """The name of the algorithm that a config class, or the nearest of its bases, is of; "" if there is none."""
    names = {path.partition(":")[2]: name for name, path in ALGORITHMS.items()}
    return next((names[klass.__name__] for klass in config_class.__mro__ if klass.__name__ in names), "")


def name_of_config(config_class: type) -> str:
    """What a checkpoint calls a config class: the nearest built-in one's name."""
    names = {path.partition(":")[2] for path in ALGORITHMS.values()} | {"AlgorithmConfig"}
    return next(klass.__name__ for klass in config_class.__mro__ if klass.__name__ in names)


def config_class_named(name: str) -> Any:
    """The built-in config class of that name; nothing else is ever imported.

    Raises:
        CheckpointError: There is none.
    """
    if name == "AlgorithmConfig":
        from rlzmq.algorithms.algorithm_config import AlgorithmConfig

        return AlgorithmConfig
    for path in ALGORITHMS.values():
        module, _, class_name = path.partition(":")
        if class_name == name:
            return getattr(importlib.import_module(module), name)
    raise CheckpointError(f"The checkpoint is of an unknown config class {name!r}. Pass config=….")
