"""Options of the commands that use a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from rlzmq.core.errors import ConfigurationError

__all__ = [
    "CheckpointOptions",
    "PolicyOptions",
    "code_arguments",
    "load_arguments",
    "place_of",
    "policy_arguments",
    "unknown_ids_explained",
]


@dataclass
class CheckpointOptions:
    """Which checkpoint to use."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run directory that holds one."""
    env: str | None = None
    """Gymnasium id, or 'package.module:Class', in place of the checkpoint's (default: the checkpoint's)."""
    config: Path | None = None
    """TOML file of settings, in place of the checkpoint's (default: the checkpoint's)."""
    trust: list[str] = field(default_factory=list)
    """Package whose code somebody else's checkpoint may name; repeatable (default: none)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@dataclass
class PolicyOptions(CheckpointOptions):
    """Which policy of a checkpoint to use."""

    module: str | None = None
    """Id of the module; needed for multi-agent checkpoints (default: none)."""
    agent: str | None = None
    """Id of the agent that it plays (default: the first one that is mapped to the module)."""


def code_arguments(options: CheckpointOptions) -> dict[str, Any]:
    """Import the modules that the options name; return the fields of `Given` that the options hand over."""
    from rlzmq.algorithms.checkpoints import read_algorithm
    from rlzmq.algorithms.stored_config import Given
    from rlzmq.cli.joining import import_first

    import_first(options.import_)
    config = None
    if options.config is not None:
        stored = read_algorithm(options.checkpoint)
        config = stored.config_class(Given(trust=options.trust)).from_toml(options.config)
    settings = {} if options.env is None else {"env": options.env}
    return {"config": config, "trust": options.trust, "settings": settings}


def load_arguments(options: CheckpointOptions) -> dict[str, Any]:
    """Return `code_arguments` as arguments of `Policy.load` and `evaluate_checkpoint`."""
    arguments = code_arguments(options)
    return {**arguments.pop("settings"), **arguments}


def policy_arguments(options: PolicyOptions) -> dict[str, Any]:
    """Return the arguments of `Policy.load` that the options ask for."""
    agent: Any = options.agent
    if agent is not None and agent.isdigit():
        agent = int(agent)  # most environments number their agents or name them
    return {
        "module_id": options.module,
        "agent_id": agent,
        **load_arguments(options),
    }


def place_of(options: CheckpointOptions, name: str, flag: str) -> Path:
    """Return the path for a file that is made of a checkpoint: in its run's directory, else in the checkpoint.

    Raises:
        ConfigurationError: There is no such directory on this machine.
    """
    from rlzmq.core.checkpoint_series import run_of

    if not options.checkpoint.is_dir():
        raise ConfigurationError(
            f"{options.checkpoint} holds no checkpoint on this machine. For one elsewhere, name a file with {flag}."
        )
    return run_of(options.checkpoint) / name


@contextmanager
def unknown_ids_explained() -> Iterator[None]:
    """Raise ConfigurationError for a module or an agent that `Policy.load` does not find."""
    try:
        yield
    except KeyError as error:
        raise ConfigurationError(str(error.args[0])) from None
