"""Algorithms by name, for the command line and for checkpoints.

Classes are imported only on request, since an algorithm imports most of the package.

Presets are stored in ``presets.toml`` in the folder of each algorithm. Each one is a table, named after its environment
(an id, or a pattern of ids) or freely. It contains the facts of `Preset`, and one table per setter.
"""

from __future__ import annotations

import fnmatch
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rlzmq.algorithms import ALGORITHMS
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.synonyms import did_you_mean, instead_of_algorithm
from rlzmq.core.trust import CALLER, find_code

__all__ = [
    "ALGORITHMS",
    "BASE_CONFIG",
    "Preset",
    "config_class_named",
    "find_preset",
    "get_config_class",
    "preset_for",
    "presets_of",
    "short_name",
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
        if path.partition(":")[2] == name:
            return find_code(path, CALLER)  # type: ignore[no-any-return]
    raise CheckpointError(f"The checkpoint is of an unknown config class {name!r}. Pass config=….")


_FACTS = ("source", "target", "budget", "seeds", "curve")


@dataclass(frozen=True)
class Preset:
    """Settings of one algorithm that are known to learn one environment.

    Attributes:
        algorithm: Name of the algorithm, e.g. ``"ppo"``.
        name: Name of the preset.
        env: The environment; a pattern such as ``"ALE/*"`` if the settings are for several.
        tables: The settings, one table per setter.
        source: The origin of the settings, and what they are good for.
        target: Mean return of the newest episodes that the settings reach (of each trained module, if there
            are several); None: not tried.
        budget: Number of env steps within which the target is reached.
        seeds: Number of env steps to the target for each seed, in one process: sampled, or trained on recorded data.
        curve: ``(env steps, mean return of the newest episodes)`` of the first seed.
    """

    algorithm: str
    name: str
    env: str
    tables: Mapping[str, Any]
    source: str
    target: float | None = None
    budget: int | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def is_pattern(self) -> bool:
        """Whether the preset is for all environments whose ids match `env`."""
        return "*" in self.env

    def matches(self, env: str) -> bool:
        """Return whether the preset is for several environments that include `env`."""
        return self.is_pattern and self.env not in ("*", env) and fnmatch.fnmatchcase(env, self.env)

    def apply(self, config: BaseConfig, env: object = None) -> None:
        """Set the environment (`env`; None: the preset's) and the settings. Other settings are unchanged.

        Raises:
            ConfigurationError: The preset is for several environments, and `env` is None.
        """
        if env is None and self.is_pattern:
            raise ConfigurationError(
                f"{self.algorithm}'s preset {self.name!r} is for several environments: choose one (--env; "
                "environment(env=…))."
            )
        config.update_from_tables(self.tables)
        config.environment(self.env if env is None else env)


@functools.cache
def presets_of(algorithm: str) -> Mapping[str, Preset]:
    """Return the algorithm's presets by name; {} if it has none."""
    file = resources.files("rlzmq.algorithms") / algorithm.lower() / "presets.toml"
    if not file.is_file():
        return {}
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: _preset(algorithm.lower(), name, entries) for name, entries in read.items()}


def _preset(algorithm: str, name: str, entries: Mapping[str, Any]) -> Preset:
    facts = {key: entries[key] for key in _FACTS if key in entries}
    facts["curve"] = tuple((steps, value) for steps, value in facts.get("curve", ()))
    tables = {key: value for key, value in entries.items() if key not in _FACTS}
    env = tables.get("environment", {}).get("env", name)
    return Preset(algorithm, name, env, tables, **facts)


def find_preset(algorithm: str, name: str) -> Preset:
    """Return a preset by its name or its environment.

    Args:
        algorithm: Name of the algorithm, e.g. ``"ppo"``.
        name: The preset's name; case is ignored and the version may be omitted: ``"cartpole"``. Or an id that the
            preset's pattern matches: ``"ALE/Pong-v5"``.

    Raises:
        ConfigurationError: There is no such preset; the text suggests the closest name.
    """
    presets = presets_of(algorithm)
    if name in presets:
        return presets[name]
    wanted = name.lower()
    found = [preset for key, preset in presets.items() if wanted in (key.lower(), short_name(key))]
    if len(found) == 1:
        return found[0]
    if preset := preset_for(algorithm, name):
        return preset
    hint = did_you_mean(name, presets) or f" `rlzmq presets {algorithm}` lists them."
    raise ConfigurationError(f"{algorithm} has no preset {name!r}.{hint}")


def preset_for(algorithm: str, env: object) -> Preset | None:
    """Return the preset named after the environment, or whose pattern matches it, or None."""
    if not isinstance(env, str):
        return None
    presets = presets_of(algorithm)
    return presets.get(env) or next((preset for preset in presets.values() if preset.matches(env)), None)


def short_name(name: str) -> str:
    """Return a preset's name in lower case and without the environment's version."""
    return name.lower().rpartition("-v")[0] if name.rpartition("-v")[2].isdigit() else name.lower()
