"""Accounting of env steps. Invariant: sampled = trained + sum(dropped by reason) + pending."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

__all__ = ["DROP_REASONS", "DropReason", "StepAccount"]

# surplus: on-policy, after its batch was complete; stale: sampled under weights that are too old; fenced: from a
# superseded incarnation; rejected: malformed, wrong shape or not finite; quarantined: learners died
# while training it; rolled_back: from a lineage that was abandoned for a checkpoint; skipped: of an
# update in which no rank took a step, as its loss or gradients were not finite.
DropReason = Literal["surplus", "stale", "fenced", "rejected", "quarantined", "rolled_back", "skipped"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


class StepAccount:
    """Counters of env steps. Each method moves steps between counters and checks the invariant."""

    def __init__(self) -> None:
        self.sampled: int = 0
        self.trained: int = 0
        self.pending: int = 0
        self.dropped: dict[str, int] = {}
        self.num_duplicates = 0

    def add_base(self, trained: int, dropped: Mapping[str, int]) -> None:
        """Add the counts of an earlier ledger, e.g. of a broker that died.

        Steps that were pending there are counted when their runners send them again.
        """
        self.trained += trained
        for reason, count in dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.sampled += trained + sum(dropped.values())
        self.check()

    def accept(self, num_steps: int) -> None:
        """Count newly arrived steps as pending."""
        self.sampled += num_steps
        self.pending += num_steps
        self.check()

    def train(self, num_steps: int) -> None:
        """Count pending steps as trained."""
        self.pending -= num_steps
        self.trained += num_steps
        self.check()

    def drop(self, num_steps: int, reason: DropReason) -> None:
        """Count pending steps as dropped."""
        if num_steps:
            self.pending -= num_steps
            self.dropped[reason] = self.dropped.get(reason, 0) + num_steps
            self.check()

    def refuse(self, num_steps: int, reason: DropReason) -> None:
        """Count steps that were dropped on arrival."""
        if num_steps:
            self.sampled += num_steps
            self.dropped[reason] = self.dropped.get(reason, 0) + num_steps
            self.check()

    def recover(self, num_steps: int) -> None:
        """Count steps that were never pending here as trained, since their update began under an earlier broker."""
        self.sampled += num_steps
        self.trained += num_steps
        self.check()

    def disown(self, num_steps: int) -> None:
        """Remove pending steps that were already counted elsewhere, since they were sent twice."""
        self.sampled -= num_steps
        self.pending -= num_steps
        self.check()

    def check(self) -> None:
        """Assert the invariant, and that no count is negative."""
        total = self.trained + sum(self.dropped.values()) + self.pending
        assert self.sampled == total, f"sampled {self.sampled} != trained + dropped + pending = {total}"
        least = min(self.sampled, self.trained, self.pending, *self.dropped.values())
        assert least >= 0, f"a count is negative: {self.counts()}, dropped {self.dropped}"

    def counts(self) -> dict[str, int]:
        """Return ``{"sampled", "trained", "pending"}``, without ``dropped``."""
        return {"sampled": self.sampled, "trained": self.trained, "pending": self.pending}
