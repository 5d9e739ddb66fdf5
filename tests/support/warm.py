"""What the tests' fork servers import before they fork."""

from __future__ import annotations

from rlzmq.actors import forkserver

__all__ = ["WARM"]

WARM = (*forkserver.PRELOAD, "torch._dynamo", "rlzmq.algorithms.ppo.ppo_config", "rlzmq.runtime.broker")
"""More than a run's own server imports: else every runner and every learner rank of every test imports its config,
and torch's compiler, which comes with DistributedDataParallel and takes each of them 1.5 s."""
