"""What one update tells the driver, and the account of every env step of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Accounting", "UpdateReport"]


@dataclass
class UpdateReport:
    """One committed update.

    Attributes:
        update_id: From 0, +1 per update.
        weights_version: The version that this update made.
        learner_results: ``{module id: {metric: value}}`` of each rank, in rank order.
        fragments: The metas of the fragments that arrived for it (episode metrics, counts, …).
        num_env_steps_trained: Env steps over all ranks.
        timers: Seconds by stage: "sample", "learn", and "synch_weights" or "update".
        policy_lag: How many weights versions the newest and the oldest step were behind the update's.
    """

    update_id: int
    weights_version: int
    learner_results: list[dict[str, Any]]
    fragments: list[dict[str, Any]]
    num_env_steps_trained: int
    timers: dict[str, float] = field(default_factory=dict)
    policy_lag: tuple[int, int] = (0, 0)


class Accounting:
    """Every env step of a run is trained, dropped for a counted reason, or pending; always.

    ``sampled == trained + sum(dropped.values()) + pending`` holds after every call.
    """

    def __init__(self) -> None:
        self.sampled = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Env steps sampled, and neither trained nor dropped so far."""
        return self.sampled - self.trained - sum(self.dropped.values())

    def add(self, *, sampled: int = 0, trained: int = 0, dropped: dict[str, int] | None = None) -> None:
        """Count further steps.

        Raises:
            AssertionError: More steps were settled than sampled: a bug.
        """
        self.sampled += sampled
        self.trained += trained
        self.dropped.update(dropped or {})
        assert self.pending >= 0, f"settled more env steps than were sampled: {self.to_dict()}"

    def drop_pending(self, reason: str) -> None:
        """Whatever is pending is dropped, e.g. at the end of a run."""
        if self.pending:
            self.dropped[reason] += self.pending

    def to_dict(self) -> dict[str, Any]:
        """``{"sampled", "trained", "dropped": {reason: steps}, "pending"}``."""
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "dropped": {reason: steps for reason, steps in self.dropped.items() if steps},
            "pending": self.pending,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Become what `to_dict` described; what was pending then is dropped ("restored")."""
        self.sampled = int(state["sampled"])
        self.trained = int(state["trained"])
        self.dropped = Counter({str(k): int(v) for k, v in state["dropped"].items()})
        self.drop_pending("restored")

    def __str__(self) -> str:
        dropped = ", ".join(f"{reason} {steps}" for reason, steps in sorted(self.dropped.items()) if steps)
        return (
            f"sampled {self.sampled} = trained {self.trained} + dropped {sum(self.dropped.values())}"
            + (f" ({dropped})" if dropped else "")
            + f" + pending {self.pending}"
        )
