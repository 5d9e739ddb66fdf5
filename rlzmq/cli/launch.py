"""``rlzmq launch`` and ``rlzmq scale``: the logs, the size and the end of a run that an engine runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rlzmq.cli.parsing import command
from rlzmq.core.errors import ConfigurationError, printable
from rlzmq.launch.engine import Engine, Jobs, engine_of

__all__ = ["launch", "scale"]

_LAST_LINES_S = 5.0  # of the log, after the head's end


@dataclass
class LaunchOptions:
    """Options of ``rlzmq launch``."""

    action: tyro.conf.Positional[Literal["logs", "stop"]]
    """Show the logs of all roles, or end the run with a checkpoint."""
    run: tyro.conf.Positional[Path]
    """Directory of a run that rlzmq train --on ENGINE started."""
    follow: bool = False
    """logs: go on until the run ends, and end with its head's exit code; Ctrl-C ends only this (default: False)."""
    grace: float = 60.0
    """stop: seconds for the head's last checkpoint, before it is killed (default: 60)."""


@command(
    LaunchOptions,
    usage="rlzmq launch ACTION RUN [--follow] [--grace S]",
    description="Show the logs of a run that an engine runs, or end it.",
)
def launch(options: LaunchOptions) -> int:
    jobs = Jobs.of_run(options.run)
    engine = engine_of(jobs)
    if options.action == "stop":
        for name in jobs.handles:  # the head first: its goodbye ends the others
            print(f"stopping    the {name}", flush=True)
            engine.end(name, engine.living(name), options.grace)
        return 0
    if not options.follow:
        for name in jobs.handles:
            _show(engine, name, follow=False)
        return 0
    threads = [
        threading.Thread(target=_show, args=(engine, name), kwargs={"follow": True}, daemon=True)
        for name in jobs.handles
    ]
    for thread in threads:
        thread.start()
    code = engine.wait()
    for thread in threads:
        thread.join(_LAST_LINES_S)
    return code


def _show(engine: Engine, role: str, *, follow: bool) -> None:
    for line in engine.logs(role, follow=follow):
        print(printable(f"[{role}] {line}", keep="\t"), flush=True)


@dataclass
class ScaleOptions:
    """Options of ``rlzmq scale``."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    env_runners: int | None = None
    """How many runners (default: as they are)."""
    learners: int | None = None
    """How many learners; those beyond the run's ranks wait as spares (default: as they are)."""


@command(
    ScaleOptions,
    usage="rlzmq scale RUN [--env-runners N] [--learners N]",
    description="Change the number of runners or learners of a living run. Those that are surplus leave in order.",
)
def scale(options: ScaleOptions) -> int:
    asked = {"runners": options.env_runners, "learners": options.learners}
    counts = {name: count for name, count in asked.items() if count is not None}
    if not counts or min(counts.values()) < 0:
        raise ConfigurationError(f"expected --env-runners or --learners, 0 or more, got {counts or 'none'}")
    jobs = Jobs.of_run(options.run)
    engine = engine_of(jobs)
    if not engine.living("head"):
        raise ConfigurationError(
            f"{options.run} has ended: its rlzmq train command with --resume auto continues it."
        )
    for name, count in counts.items():
        if name not in jobs.handles:
            raise ConfigurationError(
                f"{options.run} was started without [{name}] in its cluster file: those it has are the head's own."
            )
        engine.scale(name, count)
        print(f"{name:<11} {count}")
    return 0
