"""``rlzmq launch``: logs and end of a run that an engine runs; or a cluster file's roles over ssh."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from rlzmq.cli.interrupt import SignalEchoes, exit_code_of_signal, handled_signals
from rlzmq.cli.joining import run_async
from rlzmq.cli.main import EXIT_INTERRUPTED
from rlzmq.cli.parsing import parse
from rlzmq.core.printable import printable
from rlzmq.launch.cluster import Cluster
from rlzmq.launch.engine import Engine, Jobs, engine_of
from rlzmq.launch.launcher import Launcher

__all__ = ["LaunchOptions", "LogsOptions", "StopOptions", "run"]

_LAST_LINES_S = 5.0  # of the log, after the head's end


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


@dataclass
class LaunchOptions:
    """Options of ``rlzmq launch``."""

    cluster: tyro.conf.Positional[Path]
    """The cluster file (docs/cluster.md)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq launch``; return the exit code."""
    if arguments[:1] == ["logs"]:
        usage = "rlzmq launch logs RUN [--follow]"
        return _logs(
            parse(LogsOptions, arguments[1:], usage=usage, description="Show the logs of all roles.")
        )
    if arguments[:1] == ["stop"]:
        usage = "rlzmq launch stop RUN [--grace S]"
        return _stop(
            parse(StopOptions, arguments[1:], usage=usage, description="End a run with a checkpoint.")
        )
    options = parse(
        LaunchOptions,
        arguments,
        usage="rlzmq launch CLUSTER_FILE [options]",
        description="Run a cluster file over ssh.",
    )
    cluster = Cluster.read(options.cluster)
    return run_async(_main(cluster))


async def _main(cluster: Any) -> int:
    launcher = Launcher(cluster, lambda line: print(line, flush=True))
    running = asyncio.ensure_future(launcher.run())
    signals: list[int] = []
    echoes = SignalEchoes()
    stops: set[asyncio.Task[None]] = set()

    def end(number: int) -> None:
        """Stop the head in order; on a second signal kill everything; on a third, exit even if a host hangs."""
        if echoes.is_echo(number):
            return
        signals.append(number)
        if len(signals) == 1:
            print("stopping: the head saves a checkpoint; again to kill everything", flush=True)
            stops.add(asyncio.ensure_future(launcher.stop("INT" if number == signal.SIGINT else "TERM")))
        elif len(signals) == 2:
            running.cancel()
        else:
            os._exit(exit_code_of_signal(signals[0]))

    loop = asyncio.get_running_loop()
    for number in handled_signals():
        loop.add_signal_handler(number, end, number)
    try:
        return await running
    except asyncio.CancelledError:
        return exit_code_of_signal(signals[0]) if signals else EXIT_INTERRUPTED


def _logs(options: LogsOptions) -> int:
    jobs = Jobs.of_run(options.run)
    engine = engine_of(jobs)
    if not options.follow:
        for role, handle in jobs.handles.items():
            _show(engine, role, handle, follow=False)
        return 0
    threads = [
        threading.Thread(target=_show, args=(engine, role, handle), kwargs={"follow": True}, daemon=True)
        for role, handle in jobs.handles.items()
    ]
    for thread in threads:
        thread.start()
    code = engine.wait(jobs.handles["head"])
    for thread in threads:
        thread.join(_LAST_LINES_S)
    return code


def _show(engine: Engine, role: str, handle: str, *, follow: bool) -> None:
    for line in engine.logs(handle, follow=follow):
        print(printable(f"[{role}] {line}", keep="\t"), flush=True)


def _stop(options: StopOptions) -> int:
    jobs = Jobs.of_run(options.run)
    engine = engine_of(jobs)
    for role, handle in jobs.handles.items():  # the head first: its goodbye ends the others
        print(f"stopping    the {role}", flush=True)
        engine.stop(handle, options.grace)
    return 0
