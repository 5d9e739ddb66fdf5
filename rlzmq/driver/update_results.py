"""UpdateResult and Accounting: results of one update, and the account of all env steps of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlzmq.core.names import ALL_MODULES, BATCH_SOURCE

__all__ = ["Accounting", "UpdateResult", "num_left_out"]


@dataclass
class UpdateResult:
    """Results of one committed update.

    Attributes:
        update_id: Id of the update, counted from 0.
        weights_version: Version of the weights after the update.
        learner_results: ``{module id: {metric: value}}`` of each rank, in rank order; or a function that returns this
            until the next update, with means over the updates since its last call.
        fragments: Metadata of the fragments that arrived for it (episode metrics, counts, …).
        num_env_steps_trained: Env steps trained over all ranks. A replayed step counts each time.
        timers: Seconds by stage: "sample", "learn", and "synch_weights" or "update".
        steps_by_lag: Env steps by lag: by how many weights versions they are older than the version that the update
            starts from.
    """

    update_id: int
    weights_version: int
    learner_results: list[dict[str, Any]] | Callable[[], list[dict[str, Any]]]
    fragments: list[dict[str, Any]]
    num_env_steps_trained: int
    timers: dict[str, float] = field(default_factory=dict)
    steps_by_lag: dict[int, int] = field(default_factory=dict)


class Accounting:
    """Account of all env steps of a run: each one is trained, dropped for a counted reason, or pending.

    ``sampled == trained + sum(dropped.values()) + pending`` holds after every call.

    A step counts as *trained*, once, when the update that received it is committed. If learners keep data (a replay
    buffer), a trained step is in a rank's buffer, may be drawn any number of times, and may be evicted. When a rank
    dies, the content of its buffer changes from trained to dropped: ``buffer_lost``.
    """

    def __init__(self) -> None:
        self.sampled: int = 0
        self.trained: int = 0
        self.dropped: Counter[str] = Counter()
        self._in_sources: dict[str, int] = {}
        self._added: dict[str, int] = {}  # steps added per source
        self._nowhere: int | None = 0  # steps received but not added to any source; None: not known yet

    @property
    def num_consumed(self) -> int:
        """Number of env steps that updates received, including those lost with a buffer; never decreases."""
        return self.trained + self.dropped.get("buffer_lost", 0)

    @property
    def num_in_sources(self) -> int:
        """Number of env steps in the ranks' batch sources."""
        return sum(self._in_sources.values())

    @property
    def pending(self) -> int:
        """Number of env steps sampled and neither trained nor dropped so far."""
        return self.sampled - self.trained - sum(self.dropped.values())

    def add(self, *, sampled: int = 0, trained: int = 0, dropped: dict[str, int] | None = None) -> None:
        """Count additional steps.

        Raises:
            AssertionError: More steps were settled than sampled, which is a bug.
        """
        self.sampled += sampled
        self.trained += trained
        for reason, num_steps in (dropped or {}).items():
            self.dropped[reason] += num_steps
        assert self.pending >= 0, f"settled more env steps than were sampled: {self.to_dict()}"

    def note_sources(self, learner_results: Sequence[Mapping[str, Any]]) -> None:
        """Update the contents of the ranks' batch sources. The content of missing sources is lost.

        Args:
            learner_results: Results of each rank; none for a rank that died with its results.
        """
        sources = [
            source
            for one in learner_results
            if (source := one.get(ALL_MODULES, {}).get(BATCH_SOURCE)) is not None
        ]
        if not sources:
            return
        held = {str(source["source_id"]): int(source["num_env_steps"]) for source in sources}
        self._added |= {str(source["source_id"]): int(source["num_added"]) for source in sources}
        self._in_sources |= held
        if len(held) < max([int(source["num_ranks"]) for source in sources]):
            return  # another rank died with its results, but perhaps not with its source
        self.lose_sources([source_id for source_id in self._in_sources if source_id not in held])
        # Steps that a rank received after its last report and lost when it died.
        nowhere = self.num_consumed - sum(self._added.values())
        if self._nowhere is not None and nowhere > self._nowhere:
            self._lose(nowhere - self._nowhere)
        self._nowhere = nowhere

    def lose_sources(self, source_ids: Iterable[str]) -> None:
        """Count the content of these sources as lost."""
        for source_id in source_ids:
            self._lose(self._in_sources.pop(source_id, 0))

    def _lose(self, num_steps: int) -> None:
        lost = min(num_steps, self.trained)
        self.trained -= lost
        self.dropped["buffer_lost"] += lost

    def drop_pending(self, reason: str) -> None:
        """Count all pending steps as dropped, e.g. at the end of a run."""
        if self.pending:
            self.dropped[reason] += self.pending

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"sampled", "trained", "dropped": {reason: steps}, "pending"}``."""
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "dropped": {reason: steps for reason, steps in self.dropped.items() if steps},
            "pending": self.pending,
        }

    def get_state(self) -> dict[str, Any]:
        """Return `to_dict` and the contents of the batch sources."""
        return {**self.to_dict(), "in_sources": self.num_in_sources}

    def set_state(self, state: dict[str, Any], *, with_sources: bool = False) -> int:
        """Load a state from `get_state`. Its pending steps are dropped ("restored").

        Args:
            state: State from `get_state`.
            with_sources: Whether the content of the sources is restored, too; otherwise it is lost.

        Returns:
            Number of env steps lost with the sources.
        """
        self.sampled = int(state["sampled"])
        self.trained = int(state["trained"])
        self.dropped = Counter({str(k): int(v) for k, v in state["dropped"].items()})
        self.drop_pending("restored")
        self._nowhere = None
        if with_sources or self._in_sources:  # this run's own sources still exist
            return 0
        self._in_sources = {"restored": int(state.get("in_sources", 0))}
        num_lost = self.num_in_sources
        self.lose_sources(["restored"])
        return num_lost

    def __str__(self) -> str:
        dropped = ", ".join(f"{reason} {steps}" for reason, steps in sorted(self.dropped.items()) if steps)
        return (
            f"sampled {self.sampled} = trained {self.trained} + dropped {sum(self.dropped.values())}"
            + (f" ({dropped})" if dropped else "")
            + f" + pending {self.pending}"
        )


# Far above any real fragment; an external runner may send any number.
_MAX_LEFT_OUT = 2**40


def num_left_out(meta: Mapping[str, Any]) -> int:
    """Return the env steps that a runner left out of a fragment as non-finite."""
    num = meta.get("num_env_steps_not_finite", 0)
    return num if type(num) is int and 0 <= num <= _MAX_LEFT_OUT else 0
