"""UpdatePlan: what an update trains on, as one value that every layer reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ReplayRatio", "UpdatePlan"]


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


_ROUNDING = 1e-6  # env steps


class ReplayRatio:
    """Determines how many batches an update trains to reach a given ratio of trained to sampled env steps.

    All ranks count the same: fresh and trained env steps of all of them together. So the ratio outlives any rank, and
    what is left over after whole batches counts for the next update: trained never differs from
    ``ratio × (sampled − warm_up)`` by a batch of all ranks or more.

    Args:
        ratio: Env steps trained, repetitions counted, per env step sampled, > 0.
        warm_up: Env steps that are sampled before the first is trained; they count for nothing.
    """

    num_sampled: int
    num_trained: int

    def __init__(self, ratio: float, warm_up: int = 0) -> None:
        if ratio <= 0.0:
            raise ValueError(f"ReplayRatio: expected a ratio > 0, got {ratio}.")
        self.ratio = ratio
        self.warm_up = warm_up
        self.num_sampled = self.num_trained = 0

    def sampled(self, num_env_steps: int) -> None:
        """Add fresh env steps, summed over all ranks."""
        self.num_sampled += num_env_steps

    def take(self, batch: int) -> int:
        """Return how many batches of a number of env steps (over all ranks) are due, and count them as trained."""
        due = self.ratio * self.num_counted - self.num_trained
        num_batches = max(0, int((due + _ROUNDING) // batch))
        self.num_trained += num_batches * batch
        return num_batches

    @property
    def num_counted(self) -> int:
        """Env steps sampled since the warm-up."""
        return max(0, self.num_sampled - self.warm_up)

    def get_state(self) -> dict[str, int]:
        """Return the counts."""
        return {"num_sampled": self.num_sampled, "num_trained": self.num_trained}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.num_sampled, self.num_trained = int(state["num_sampled"]), int(state["num_trained"])
