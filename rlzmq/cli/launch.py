"""``rlzmq launch`` and ``rlzmq scale``: the logs, the size and the end of a run that an engine runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlzmq.cli.main import EXIT_USAGE
from rlzmq.cli.parsing import command, parse
from rlzmq.core.errors import ConfigurationError, printable
from rlzmq.core.synonyms import did_you_mean
from rlzmq.launch.engine import Engine, Jobs, engine_of

__all__ = ["LogsOptions", "StopOptions", "run", "scale"]

_LAST_LINES_S = 5.0  # of the log, after the head's end
_USAGE = """\
usage: rlzmq launch logs RUN [--follow]   show the logs of all roles
       rlzmq launch stop RUN [--grace S]  end the run with a checkpoint

RUN is the directory of a run that `rlzmq train … --on ENGINE` started."""


@dataclass
class LogsOptions:
    """Options of ``rlzmq launch logs``."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    follow: bool = False
    """Go on until the run ends, and end with its head's exit code; Ctrl-C ends only this (default: False)."""


@dataclass
class StopOptions:
    """Options of ``rlzmq launch stop``."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    grace: float = 60.0
    """Seconds for the head's last checkpoint, before it is killed (default: 60)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq launch``; return the exit code."""
    what, *rest = arguments or [""]
    if what == "logs":
        usage = "rlzmq launch logs RUN [--follow]"
        return _logs(parse(LogsOptions, rest, usage=usage, description="Show the logs of all roles."))
    if what == "stop":
        usage = "rlzmq launch stop RUN [--grace S]"
        return _stop(parse(StopOptions, rest, usage=usage, description="End a run with a checkpoint."))
    if what in ("-h", "--help"):
        print(_USAGE)
        return 0
    hint = did_you_mean(what, ("logs", "stop"))
    print(f"{_USAGE}\nrlzmq: expected logs or stop, got {what or 'nothing'}.{hint}", file=sys.stderr)
    return EXIT_USAGE


def _logs(options: LogsOptions) -> int:
    jobs = Jobs.of_run(options.run)
    engine = engine_of(jobs)
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


def _stop(options: StopOptions) -> int:
    jobs = Jobs.of_run(options.run)
    engine = engine_of(jobs)
    for name in jobs.handles:  # the head first: its goodbye ends the others
        print(f"stopping    the {name}", flush=True)
        engine.end(name, engine.living(name), options.grace)
    return 0


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
