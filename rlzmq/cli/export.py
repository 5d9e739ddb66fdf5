"""``rlzmq export``: write a checkpoint's policy as an ONNX or torch.export file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from rlzmq.cli.parsing import parse

__all__ = ["ExportOptions", "PolicyOptions", "chosen_policy", "run"]


@dataclass
class PolicyOptions:
    """Which policy to use; shared by ``rlzmq export`` and ``rlzmq serve``."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run directory that holds one."""
    module: str | None = None
    """Id of the module; needed for multi-agent checkpoints (default: none)."""
    agent: str | None = None
    """Id of the agent that it plays (default: the first one that is mapped to the module)."""
    config: Path | None = None
    """TOML file of settings, for a checkpoint whose config contains code (default: the checkpoint's config)."""
    trust_code: bool = False
    """Import functions and classes that the checkpoint's config names (default: False)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@dataclass
class ExportOptions(PolicyOptions):
    """Options of ``rlzmq export``."""

    format: Literal["onnx", "pt2"] = "onnx"
    """Format of the file: onnx (for onnxruntime), or pt2 (for torch.export.load) (default: onnx)."""
    output: Path | None = None
    """The file; it is replaced if it exists (default: ./policy.onnx or ./policy.pt2)."""
    observations: int = 1000
    """Number of random observations on which the file is compared with the policy (default: 1000)."""
    seed: int = 0
    """Seed of these observations (default: 0)."""


def run(arguments: Sequence[str]) -> int:
    """The command: `arguments` without ``rlzmq export``; the exit code."""
    options = parse(
        ExportOptions,
        arguments,
        usage="rlzmq export RUN_OR_CHECKPOINT [options]",
        description="Write a checkpoint's policy with its connectors as one file, and compare it with the policy.",
    )
    from rlzmq.algorithms.policy import Policy
    from rlzmq.core.errors import ConfigurationError
    from rlzmq.deploy.export import export_policy

    if options.observations < 1:
        raise ConfigurationError(f"--observations {options.observations}: expected 1 or more")
    output = options.output or Path(f"policy.{options.format}")
    policy = Policy.load(options.checkpoint, **chosen_policy(options))
    result = export_policy(
        policy, output, format=options.format, num_checked=options.observations, seed=options.seed
    )
    print(f"checked   {result}")
    print(f"exported  {output} ({output.stat().st_size / 1024:,.0f} KiB)")
    return 0


def chosen_policy(options: PolicyOptions) -> dict[str, Any]:
    """Return the arguments of `Policy.load` that the options ask for, after importing what they name."""
    from rlzmq.algorithms.checkpoints import load_config_class
    from rlzmq.cli.joining import import_first

    import_first(options.import_)
    config = None
    if options.config is not None:
        config = load_config_class(options.checkpoint, trust_code=options.trust_code).from_toml(
            options.config
        )
    agent: Any = options.agent
    if agent is not None and agent.isdigit():
        agent = int(agent)  # most environments number their agents or name them
    return {
        "module_id": options.module,
        "agent_id": agent,
        "config": config,
        "trust_code": options.trust_code,
    }
