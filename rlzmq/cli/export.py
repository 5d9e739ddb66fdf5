"""``rlzmq export``: write a checkpoint's policy as an ONNX or torch.export file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rlzmq.cli.checkpoint_options import PolicyOptions, place_of, policy_arguments, unknown_ids_explained
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError

__all__ = ["ExportOptions", "run"]


@dataclass
class ExportOptions(PolicyOptions):
    """Options of ``rlzmq export``."""

    format: Literal["onnx", "pt2"] = "onnx"
    """Format of the file: onnx (for onnxruntime), or pt2 (for torch.export.load) (default: onnx)."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file; it is replaced if it exists (default: policy.onnx or policy.pt2 in the run directory)."""
    observations: int = 1000
    """Number of random observations on which the file is compared with the policy (default: 1000)."""
    seed: int = 0
    """Seed of these observations (default: 0)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq export``; return the exit code."""
    options = parse(
        ExportOptions,
        arguments,
        usage="rlzmq export RUN_OR_CHECKPOINT [options]",
        description="Write a checkpoint's policy with its connectors as one file, and compare it with the policy.",
    )
    from rlzmq.algorithms.policy import Policy
    from rlzmq.deploy.export import export_policy

    if options.observations < 1:
        raise ConfigurationError(f"--observations {options.observations}: expected 1 or more")
    output = options.output or place_of(options, f"policy.{options.format}", "--output")
    with unknown_ids_explained():
        policy = Policy.load(options.checkpoint, **policy_arguments(options))
    result = export_policy(
        policy, output, format=options.format, num_checked=options.observations, seed=options.seed
    )
    print(f"checked   {result}")
    print(f"exported  {output} ({output.stat().st_size / 1024:,.0f} KiB)")
    return 0
