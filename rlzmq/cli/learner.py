"""``rlzmq learner``: a learner rank that joins a run, started by hand or by a scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlzmq.cli.interrupt import exit_code_of_signal
from rlzmq.cli.joining import import_first, make_config, on_signals, read_join_file, run_async
from rlzmq.cli.main import EXIT_UNREACHABLE
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError, PeerLostError

__all__ = ["LearnerOptions", "SchedulerRank", "run"]


# A signal may have been sent to all processes of the run: without learners its driver has no last checkpoint to write.
_LEAVE_S, _LEAVE_AFTER_CTRL_C_S = 8.0, 3.0

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_LOCAL = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class SchedulerRank:
    """The rank of this process in a scheduler's job; -1 if the scheduler sets no variable.

    MASTER_ADDR and MASTER_PORT are not needed: learners use the driver's store.

    Attributes:
        rank: Rank among all processes of the job.
        world_size: Number of processes.
        local_rank: Rank among the processes on this machine: the GPU to use.
    """

    rank: int = -1
    world_size: int = -1
    local_rank: int = -1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> SchedulerRank:
        """Read the rank of this process.

        Raises:
            ConfigurationError: A variable is not a number.
        """
        env = os.environ if environment is None else environment
        return cls(_first(env, _RANK), _first(env, _SIZE), _first(env, _LOCAL))


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in env:
            try:
                return int(env[name])
            except ValueError:
                raise ConfigurationError(f"{name}={env[name]!r} is not a number") from None
    return -1


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
    from rlzmq.roles.learner_role import RemoteLearner

    place = SchedulerRank.from_environment()
    join = read_join_file(options.join, "learner")
    import_first(options.import_)

    def config_here(packed: object) -> Any:
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
        wait_s = _LEAVE_S if number != signal.SIGINT else _LEAVE_AFTER_CTRL_C_S
        print(
            f"leaving in {wait_s:g} s, or with the run if it ends before; again to leave at once", flush=True
        )
        asyncio.get_running_loop().call_later(wait_s, learner.end)

    try:
        with on_signals(leave):
            await learner.run()
    except PeerLostError as error:
        print(f"rlzmq: {error}", file=sys.stderr, flush=True)
        return EXIT_UNREACHABLE
    return exit_code_of_signal(signals[0]) if signals else 0
