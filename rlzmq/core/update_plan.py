"""UpdatePlan: what an update trains on, as one value that every layer reads."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UpdatePlan"]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How much fresh data an update takes, and how old it may be.

    The config makes it (`AlgorithmConfig.update_plan`); the driver opens updates by it, the broker grants leases
    by it, and a run in one process samples by it.

    Attributes:
        env_steps_per_rank: Fresh env steps of one update for each learner rank; 0: an update needs none (offline
            data), and nothing is sampled.
        num_ranks: Learner ranks that the batch is divided by; it stays as it is while a rank is missing.
        fragment_length: Vector steps of a full lease.
        staleness: S. 0: an update trains exactly on what was sampled with the weights it starts from. S >= 1:
            runners sample up to S batches ahead, and no trained step is more than S versions old.
        max_policy_lag: Data older than this many versions is dropped, and counted as ``stale``.
        train_ratio: Env steps trained per env step that an update takes in, repetitions counted; 0: each is trained as
            the batch source gives it. With a ratio an update trains as many batches as are due, and is committed then;
            sampling waits for it, S + 1 updates ahead at most.
        warm_up: With a ratio, env steps that are taken in before the first is trained.
        keeps_episodes: All chunks of an episode go to the same rank, for sources that join them (n-step sums,
            sequences). The batch over all ranks stays exact; a rank's part is what its environments sampled. An
            episode of a multi-agent environment, too, is of one runner, whose episodes all go to one rank then.
        open_updates: How many updates the driver keeps open at once.
    """

    env_steps_per_rank: int
    num_ranks: int
    fragment_length: int
    staleness: int = 0
    max_policy_lag: int = 0
    train_ratio: float = 0.0
    warm_up: int = 0
    keeps_episodes: bool = False
    open_updates: int = 1

    @property
    def num_env_steps(self) -> int:
        """Fresh env steps of one update over all ranks."""
        return self.env_steps_per_rank * self.num_ranks
