"""``rlzmq launch``: start a cluster file's roles on their hosts, with all logs here and one Ctrl-C for all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from rlzmq.cli.interrupt import SignalEchoes, exit_code_of_signal, handled_signals
from rlzmq.cli.joining import run_async
from rlzmq.cli.main import EXIT_INTERRUPTED
from rlzmq.cli.parsing import parse
from rlzmq.launch.cluster import Cluster
from rlzmq.launch.launcher import Launcher
from rlzmq.launch.templates import render

__all__ = ["LaunchOptions", "run"]


@dataclass
class LaunchOptions:
    """Options of ``rlzmq launch``."""

    cluster: tyro.conf.Positional[Path]
    """The cluster file (docs/cluster.md)."""
    render: Literal["kubernetes"] | None = None
    """Print a job file for this scheduler instead of starting anything (default: none)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq launch``; return the head\'s exit code."""
    options = parse(
        LaunchOptions,
        arguments,
        usage="rlzmq launch CLUSTER_FILE [options]",
        description="Run a cluster file over ssh.",
    )
    cluster = Cluster.read(options.cluster)
    if options.render is not None:
        print(render(cluster), end="")
        return 0
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
