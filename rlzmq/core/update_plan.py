"""UpdatePlan: the training data of an update, as one value that every layer reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ReplayRatio", "UpdatePlan"]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How much fresh data an update takes, and how old it may be.

    The config creates it (`AlgorithmConfig.update_plan`). The driver uses it to open updates, the broker to grant
    leases, and a run in one process to sample.

    Attributes:
        env_steps_per_rank: Fresh env steps of one update for each learner rank, at least (with S = 0 all that was
            sampled for it) or exactly (S >= 1); 0: an update needs none (offline
            data), and nothing is sampled.
        num_ranks: Number of learner ranks that share a batch. It does not change while a rank is missing.
        fragment_length: Vector steps of a full lease.
        staleness: S. 0: an update trains exactly on data sampled with the weights it starts from. S >= 1: runners
            sample up to S batches ahead, and no trained step is more than S versions old.
        max_policy_lag: Data older than this many versions is dropped, and counted as ``stale``.
        train_ratio: Trained env steps, counting repetitions, per env step that an update takes; 0: the batch source
            decides. With a ratio, an update trains as many batches as are due and is then committed; sampling waits
            for it, at most S + 1 updates ahead.
        warm_up: With a ratio, the number of env steps taken before the first one is trained.
        keeps_episodes: Whether all chunks of an episode go to the same rank, for sources that join them (n-step sums,
            sequences). A rank's part is the data of its environments. A
            runner with a multi-agent environment sends all its episodes to one rank.
        open_updates: Number of updates that the driver keeps open at the same time.
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
        """Number of fresh env steps of one update over all ranks."""
        return self.env_steps_per_rank * self.num_ranks


_ROUNDING = 1e-6  # env steps


class ReplayRatio:
    """Computes the number of batches that an update trains to reach a given ratio of trained to sampled env steps.

    All ranks have the same counts: fresh and trained env steps of all ranks together. The ratio therefore survives
    the loss of a rank, and a remainder after whole batches counts for the next update: the trained steps never differ
    from ``ratio × (sampled − warm_up)`` by a batch of all ranks or more.

    Args:
        ratio: Trained env steps, counting repetitions, per sampled env step, > 0.
        warm_up: Number of env steps sampled before the first one is trained; they do not count.
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
        """Return the number of due batches of `batch` env steps (over all ranks), and count them as trained."""
        due = self.ratio * self.num_counted - self.num_trained
        num_batches = max(0, int((due + _ROUNDING) // batch))
        self.num_trained += num_batches * batch
        return num_batches

    @property
    def num_counted(self) -> int:
        """Number of env steps sampled since the warm-up."""
        return max(0, self.num_sampled - self.warm_up)

    def get_state(self) -> dict[str, int]:
        """Return the counts."""
        return {"num_sampled": self.num_sampled, "num_trained": self.num_trained}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.num_sampled, self.num_trained = int(state["num_sampled"]), int(state["num_trained"])
