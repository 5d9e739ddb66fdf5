"""The rank of a process in a scheduler's job, from the environment variables of torchrun, Slurm or Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlzmq.core.errors import ConfigurationError

__all__ = ["SchedulerRank"]

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
