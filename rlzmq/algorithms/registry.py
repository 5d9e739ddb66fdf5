"""The algorithms by name, for the command line and for checkpoints, and their presets.

Classes are imported only when requested, since an algorithm imports torch. A preset holds settings that are known to
work for an algorithm on a well-known environment.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import load_named
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = [
    "ALGORITHMS",
    "BASE_CONFIG",
    "apply_preset",
    "config_class_named",
    "find_preset",
    "get_config_class",
    "presets_of",
]

ALGORITHMS: dict[str, str] = {
    "appo": "rlzmq.algorithms.appo:APPOConfig",
    "bc": "rlzmq.algorithms.bc:BCConfig",
    "cql": "rlzmq.algorithms.cql:CQLConfig",
    "dqn": "rlzmq.algorithms.dqn:DQNConfig",
    "impala": "rlzmq.algorithms.impala:IMPALAConfig",
    "iql": "rlzmq.algorithms.iql:IQLConfig",
    "marwil": "rlzmq.algorithms.marwil:MARWILConfig",
    "ppo": "rlzmq.algorithms.ppo:PPOConfig",
    "sac": "rlzmq.algorithms.sac:SACConfig",
    "tqc": "rlzmq.algorithms.tqc:TQCConfig",
}
BASE_CONFIG = "rlzmq.algorithms.algorithm_config:AlgorithmConfig"


def get_config_class(algorithm: str) -> Any:
    """Return the config class of an algorithm by name, e.g. ``"ppo"`` (case is ignored).

    Raises:
        ConfigurationError: There is no such algorithm.
    """
    if algorithm.lower() not in ALGORITHMS:
        raise ConfigurationError(f"No algorithm {algorithm!r}.{did_you_mean(algorithm, ALGORITHMS)}")
    return load_named(ALGORITHMS[algorithm.lower()])


def config_class_named(name: str) -> type[BaseConfig]:
    """Return the built-in config class of that name; imports no other code.

    Raises:
        CheckpointError: There is no such class.
    """
    for path in (BASE_CONFIG, *ALGORITHMS.values()):
        if _name(path) == name:
            return load_named(path)  # type: ignore[no-any-return]
    raise CheckpointError(f"The checkpoint is of an unknown config class {name!r}. Pass config=….")


def _name(path: str) -> str:
    return path.partition(":")[2]


def presets_of(algorithm: str) -> dict[str, dict[str, Any]]:
    """Return the algorithm's presets as {environment id: {setter: settings}}; {} if it has none."""
    file = resources.files("rlzmq.algorithms") / algorithm.lower() / "presets.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def find_preset(algorithm: str, name: str) -> str:
    """Return the environment id of a preset.

    Args:
        algorithm: Name of the algorithm, e.g. ``"ppo"``.
        name: The id; case is ignored and the version may be omitted: ``"cartpole"``.

    Raises:
        ConfigurationError: There is no such preset, or several match.
    """
    presets = presets_of(algorithm)
    wanted = name.lower()
    found = [env for env in presets if wanted in (env.lower(), env.lower().rpartition("-v")[0])]
    if name not in presets and len(found) != 1:
        raise ConfigurationError(f"{algorithm} has no preset {name!r}.{did_you_mean(name, presets)}")
    return name if name in presets else found[0]


def apply_preset(config: BaseConfig, algorithm: str, env: object) -> bool:
    """Apply the algorithm's preset for `env`, if there is one.

    Args:
        config: The algorithm's config; settings outside the preset are unchanged.
        algorithm: Name of the algorithm, e.g. ``"ppo"``.
        env: ``config.env``.

    Returns:
        Whether there is a preset.
    """
    preset = presets_of(algorithm).get(env) if isinstance(env, str) else None
    if preset is None:
        return False
    config.update_from_tables(preset)
    return True
