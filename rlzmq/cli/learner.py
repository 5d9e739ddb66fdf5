"""``rlzmq learner``: a learner rank that joins a run, started by hand or by a scheduler."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlzmq.cli.joining import import_first, make_config, on_signals, read_join_file, run_async
from rlzmq.cli.main import EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_UNREACHABLE
from rlzmq.cli.parsing import parse
from rlzmq.cli.scheduler import SchedulerRank
from rlzmq.core.errors import PeerLostError

__all__ = ["LearnerOptions", "run"]


@dataclass
class LearnerOptions:
    """Options of ``rlzmq learner``."""

    join: Path
    """The run's *.learner.toml, mode 0600; -: standard input."""
    timeout: float = 300.0
    """Seconds to wait for the driver at the start (default: 300); once connected it waits as a spare, without limit."""
    import_: list[str] = field(default_factory=list)
    """Module to import first; repeatable (default: none)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq learner``; return the exit code."""
    options = parse(
        LearnerOptions,
        arguments,
        usage="rlzmq learner --join FILE [options]",
        description="Train a rank of a run with num_remote_learners. RANK, LOCAL_RANK (torchrun) and "
        "SLURM_PROCID, SLURM_LOCALID are used where set.",
    )
    code = run_async(_main(options))
    sys.stdout.flush()
    os._exit(code)  # a collective without its peers may still block the training thread


async def _main(options: LearnerOptions) -> int:
    from rlzmq.roles.learner.remote_learner import RemoteLearner

    place = SchedulerRank.from_environment()
    join = read_join_file(options.join, "learner")
    import_first(options.import_)

    def config_here(packed: Any) -> Any:
        config = make_config(packed)
        if place.local_rank >= 0:
            config.learners(local_gpu_idx=place.local_rank)
        config.freeze()
        return config

    learner = RemoteLearner(join, config_here, preferred_rank=place.rank, timeout_s=options.timeout)
    print(f"{learner.name} waits for {join.addresses['control']}", flush=True)
    signals: list[int] = []

    def leave(number: int) -> None:
        signals.append(number)
        learner.end()

    try:
        with on_signals(leave):
            await learner.run()
    except PeerLostError as error:
        print(f"rlzmq: {error}", file=sys.stderr, flush=True)
        return EXIT_UNREACHABLE
    if signals:
        return EXIT_INTERRUPTED if signals[0] == signal.SIGINT else EXIT_RESUMABLE
    return 0
