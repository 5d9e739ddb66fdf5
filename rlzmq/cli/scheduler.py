"""What a scheduler tells its processes by the environment: torchrun's, Slurm's and Kubernetes' variables."""

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
    """Where a scheduler put this process; -1 for what it does not say.

    MASTER_ADDR and MASTER_PORT are not needed: learners meet at the driver's own store.

    Attributes:
        rank: Among all processes of the job.
        world_size: How many there are.
        local_rank: Among those of this machine: the GPU to use.
    """

    rank: int = -1
    world_size: int = -1
    local_rank: int = -1

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> SchedulerRank:
        """This process's place.

        Raises:
            ConfigurationError: A variable holds no number.
        """
        env = os.environ if environment is None else environment
        return cls(_first(env, _RANK), _first(env, _SIZE), _first(env, _LOCAL))


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in env:
            try:
                return int(env[name])
            except ValueError:
                raise ConfigurationError(f"{name}={env[name]!r} is no number") from None
    return -1
