"""``rlzmq launch``: a cluster file's roles on their machines, with all logs here and one Ctrl-C for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

__all__ = ["LaunchOptions", "run"]


@dataclass
class LaunchOptions:
    """Options of ``rlzmq launch``."""

    cluster: Path
    """The cluster file (docs/cluster.md)."""
    render: Literal["slurm", "kubernetes"] | None = None
    """Print a job file for this scheduler instead of starting anything (default: none)."""


def run(arguments: Sequence[str]) -> int:
    """The command: `arguments` without ``rlzmq launch``; the head's exit code."""
    import tyro

    from rlzmq.cli.joining import run_async
    from rlzmq.launch.cluster import Cluster

    kind: Any = Annotated[LaunchOptions, tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff]
    options: LaunchOptions = tyro.cli(
        kind, args=list(arguments), prog="rlzmq launch", description="Run a cluster file over ssh."
    )
    cluster = Cluster.read(options.cluster)
    if options.render is not None:
        from rlzmq.launch.templates import render

        print(render(options.render, cluster), end="")
        return 0
    return run_async(_main(cluster))


async def _main(cluster: Any) -> int:
    from rlzmq.cli.joining import on_signals
    from rlzmq.launch.launcher import Launcher

    launcher = Launcher(cluster, lambda line: print(line, flush=True))
    stops: set[asyncio.Task[None]] = set()
    with on_signals(lambda number: stops.add(asyncio.ensure_future(launcher.stop()))):
        return await launcher.run()
