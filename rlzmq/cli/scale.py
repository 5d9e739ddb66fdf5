"""``rlzmq scale``: change the number of runners or learners of a living run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError
from rlzmq.launch.engine import Jobs, engine_of

__all__ = ["ScaleOptions", "run"]


@dataclass
class ScaleOptions:
    """Options of ``rlzmq scale``."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    env_runners: int | None = None
    """How many runners (default: as they are)."""
    learners: int | None = None
    """How many learners; those beyond the run's ranks wait as spares (default: as they are)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq scale``; return the exit code."""
    options = parse(
        ScaleOptions,
        arguments,
        usage="rlzmq scale RUN [--env-runners N] [--learners N]",
        description="Change the number of runners or learners of a living run. Those that are surplus leave in order.",
    )
    asked = {"runners": options.env_runners, "learners": options.learners}
    counts = {name: count for name, count in asked.items() if count is not None}
    if not counts or min(counts.values()) < 0:
        raise ConfigurationError(f"expected --env-runners or --learners, 0 or more, got {counts or 'none'}")
    if not (options.run / "jobs" / "roles.json").exists():
        raise ConfigurationError(
            f"{options.run} was not started with --on. To add runners to a run that listens: rlzmq runner --join FILE "
            "--env-runners N. Otherwise end it with Ctrl-C (it saves a checkpoint), and continue with "
            f"rlzmq train ALGORITHM --resume {options.run} --env-runners N."
        )
    jobs = Jobs.of_run(options.run)
    engine = engine_of(jobs)
    for name, count in counts.items():
        if name not in jobs.handles:
            raise ConfigurationError(
                f"{options.run} was started without [{name}] in its cluster file: those it has are the head's own."
            )
        engine.scale(name, count)
        print(f"{name:<11} {count}")
    return 0
