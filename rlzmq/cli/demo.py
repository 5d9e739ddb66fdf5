"""``rlzmq demo``: train CartPole-v1 with a broker, runners and learners as processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlzmq.cli import train
from rlzmq.cli.parsing import parse

__all__ = ["DemoOptions", "run"]


@dataclass
class DemoOptions:
    """Options of ``rlzmq demo``."""

    env_runners: int = 2
    """Number of processes that sample (default: 2)."""
    learners: int = 2
    """Number of processes that train (default: 2)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq demo``; return the exit code."""
    options = parse(
        DemoOptions,
        arguments,
        usage="rlzmq demo [options]",
        description="Train CartPole-v1 until the mean return is 450, for at most 300,000 env steps.",
    )
    processes = ["--env-runners", str(options.env_runners), "--learners", str(options.learners)]
    command = ["ppo", "--env", "CartPole-v1", *processes, "--seed", "1"]
    command += ["--stop", "return=450", "--stop", "steps=300000"]
    print(f"$ rlzmq train {' '.join(command)}", flush=True)
    return train.run(command)
