"""Algorithms by name, for the command line and for checkpoints.

Classes are imported only on request, since an algorithm imports most of the package.
"""

from __future__ import annotations

from typing import Any

from rlzmq.algorithms import ALGORITHMS
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.synonyms import instead_of_algorithm
from rlzmq.core.trust import CALLER, find_code

__all__ = [
    "ALGORITHMS",
    "BASE_CONFIG",
    "config_class_named",
    "get_config_class",
]

BASE_CONFIG = "rlzmq.algorithms.algorithm_config:AlgorithmConfig"


def get_config_class(algorithm: str) -> Any:
    """Return the config class of an algorithm by name, e.g. ``"ppo"`` (case is ignored).

    Raises:
        ConfigurationError: There is no such algorithm.
    """
    if algorithm.lower() not in ALGORITHMS:
        instead = instead_of_algorithm(algorithm)
        hint = f" Instead: {instead}." if instead else did_you_mean(algorithm, ALGORITHMS)
        raise ConfigurationError(f"No algorithm {algorithm!r}.{hint}")
    return find_code(ALGORITHMS[algorithm.lower()], CALLER)


def config_class_named(name: str) -> type[BaseConfig]:
    """Return the built-in config class with this name. No other code is imported.

    Raises:
        CheckpointError: There is no such class.
    """
    for path in (BASE_CONFIG, *ALGORITHMS.values()):
        if _name(path) == name:
            return find_code(path, CALLER)  # type: ignore[no-any-return]
    raise CheckpointError(f"The checkpoint is of an unknown config class {name!r}. Pass config=….")


def _name(path: str) -> str:
    return path.partition(":")[2]
