"""Presets: settings that are known to work for an algorithm on a well-known environment."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["apply_preset", "find_preset", "presets_of"]


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
