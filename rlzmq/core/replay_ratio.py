"""ReplayRatio: ratio of trained to sampled env steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ReplayRatio"]

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
