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
    """The algorithm's presets: environment id -> setter -> settings ({} where it ships none)."""
    file = resources.files("rlzmq.algorithms") / algorithm.lower() / "presets.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def find_preset(algorithm: str, name: str) -> str:
    """The id of the environment that a preset is for.

    Args:
        algorithm: Its name, e.g. ``"ppo"``.
        name: The id; case and version may be left out: ``"cartpole"``.

    Raises:
        ConfigurationError: There is none, or several.
    """
    presets = presets_of(algorithm)
    wanted = name.lower()
    found = [env for env in presets if wanted in (env.lower(), env.lower().rpartition("-v")[0])]
    if name not in presets and len(found) != 1:
        raise ConfigurationError(f"{algorithm} has no preset {name!r}.{did_you_mean(name, presets)}")
    return name if name in presets else found[0]


def apply_preset(config: BaseConfig, algorithm: str, env: object) -> bool:
    """Set what the algorithm's preset for `env` says, if there is one.

    Args:
        config: The algorithm's config; settings outside the preset stay as they are.
        algorithm: Its name, e.g. ``"ppo"``.
        env: ``config.env``.

    Returns:
        Whether there is a preset.
    """
    preset = presets_of(algorithm).get(env) if isinstance(env, str) else None
    if preset is None:
        return False
    config.update_from_tables(preset)
    return True
