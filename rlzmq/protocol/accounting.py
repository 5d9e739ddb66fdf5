"""The identity that holds at every moment: sampled = trained + sum(dropped by reason) + pending."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

__all__ = ["DROP_REASONS", "DropReason", "StepAccount"]

# surplus: beyond an exact batch; stale: sampled under weights that are too old; fenced: of a
# superseded incarnation; rejected: malformed, wrong shape or not finite; quarantined: learners died
# with it; rolled_back: of a lineage that was abandoned for a checkpoint; skipped: it made the loss not
# finite and was left out of its update, or all ranks skipped all steps of the update.
DropReason = Literal["surplus", "stale", "fenced", "rejected", "quarantined", "rolled_back", "skipped"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


class StepAccount:
    """Counts env steps. Each method moves steps from one place to another and checks the identity."""

    def __init__(self) -> None:
        self.sampled = 0
        self.trained = 0
        self.pending = 0
        self.dropped: dict[str, int] = {}
        self.num_duplicates = 0

    def add_base(self, trained: int, dropped: Mapping[str, int]) -> None:
        """What was counted before this ledger began, e.g. under a broker that died.

        What was pending then is sampled anew when its runners send it again.
        """
        self.trained += trained
        for reason, count in dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.sampled += trained + sum(dropped.values())
        self.check()

    def accept(self, num_steps: int) -> None:
        """Steps arrived and are pending."""
        self.sampled += num_steps
        self.pending += num_steps
        self.check()

    def train(self, num_steps: int) -> None:
        """Pending steps were trained and committed."""
        self.pending -= num_steps
        self.trained += num_steps
        self.check()

    def drop(self, num_steps: int, reason: DropReason) -> None:
        """Pending steps will not be trained."""
        if num_steps:
            self.pending -= num_steps
            self.dropped[reason] = self.dropped.get(reason, 0) + num_steps
            self.check()

    def refuse(self, num_steps: int, reason: DropReason) -> None:
        """Steps arrived and were dropped at the door."""
        if num_steps:
            self.sampled += num_steps
            self.dropped[reason] = self.dropped.get(reason, 0) + num_steps
            self.check()

    def recover(self, num_steps: int) -> None:
        """Steps that never were pending here turn out to be trained: by an update that began under
        a broker before this one."""
        self.sampled += num_steps
        self.trained += num_steps
        self.check()

    def retract(self, num_steps: int, reason: DropReason) -> None:
        """Steps that counted as trained turn out to have lain in a learner's buffer, and are dropped from it."""
        num_steps = min(num_steps, self.trained)
        if num_steps:
            self.trained -= num_steps
            self.dropped[reason] = self.dropped.get(reason, 0) + num_steps
            self.check()

    def disown(self, num_steps: int) -> None:
        """Pending steps were counted elsewhere already: they were sent a second time."""
        self.sampled -= num_steps
        self.pending -= num_steps
        self.check()

    def check(self) -> None:
        """Asserts the identity, and that nothing is negative."""
        total = self.trained + sum(self.dropped.values()) + self.pending
        assert self.sampled == total, f"sampled {self.sampled} != trained + dropped + pending = {total}"
        least = min(self.sampled, self.trained, self.pending, *self.dropped.values())
        assert least >= 0, f"a count is negative: {self.counts()}, dropped {self.dropped}"

    def counts(self) -> dict[str, int]:
        """``{"sampled", "trained", "pending"}``; ``dropped`` is apart, by reason."""
        return {"sampled": self.sampled, "trained": self.trained, "pending": self.pending}
