"""Options of the commands that use a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from rlzmq.config.base_config import BaseConfig

__all__ = ["CheckpointOptions", "PolicyOptions", "given_config", "policy_arguments", "unknown_ids_explained"]


@dataclass
class CheckpointOptions:
    """Which checkpoint to use."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run directory that holds one."""
    config: Path | None = None
    """TOML file of settings, for a checkpoint whose config contains code (default: the checkpoint's config)."""
    trust_code: bool = False
    """Import functions and classes that the checkpoint's config names (default: False)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@dataclass
class PolicyOptions(CheckpointOptions):
    """Which policy of a checkpoint to use."""

    module: str | None = None
    """Id of the module; needed for multi-agent checkpoints (default: none)."""
    agent: str | None = None
    """Id of the agent that it plays (default: the first one that is mapped to the module)."""


def given_config(options: CheckpointOptions) -> BaseConfig | None:
    """Import the modules that the options name; return the config of their file, or None without one."""
    from rlzmq.algorithms.checkpoints import load_config_class
    from rlzmq.cli.joining import import_first

    import_first(options.import_)
    if options.config is None:
        return None
    return load_config_class(options.checkpoint, trust_code=options.trust_code).from_toml(options.config)


def policy_arguments(options: PolicyOptions) -> dict[str, Any]:
    """Return the arguments of `Policy.load` that the options ask for."""
    agent: Any = options.agent
    if agent is not None and agent.isdigit():
        agent = int(agent)  # most environments number their agents or name them
    return {
        "module_id": options.module,
        "agent_id": agent,
        "config": given_config(options),
        "trust_code": options.trust_code,
    }


@contextmanager
def unknown_ids_explained() -> Iterator[None]:
    """Raise ConfigurationError for a module or an agent that `Policy.load` does not find."""
    from rlzmq.core.errors import ConfigurationError

    try:
        yield
    except KeyError as error:
        raise ConfigurationError(str(error.args[0])) from None
