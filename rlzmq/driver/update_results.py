"""What one update tells the driver, and the account of every env step of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlzmq.core.names import ALL_MODULES, BATCH_SOURCE

__all__ = ["Accounting", "UpdateResult"]


@dataclass
class UpdateResult:
    """One committed update.

    Attributes:
        update_id: From 0, +1 per update.
        weights_version: The version that this update made.
        learner_results: ``{module id: {metric: value}}`` of each rank, in rank order.
        fragments: The metas of the fragments that arrived for it (episode metrics, counts, …).
        num_env_steps_trained: Env steps over all ranks, counted as often as updates trained them: a replayed step
            more than once.
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

    A step is *trained* here, once, when the update that took it in is committed. Where learners keep data (a replay
    buffer), this means that it is in a rank's buffer, may be drawn any number of times, and may leave it to make room.
    What a buffer holds when its rank dies turns from trained into dropped: ``buffer_lost``.
    """

    def __init__(self) -> None:
        self.sampled = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._in_sources: dict[str, int] = {}
        self._added: dict[str, int] = {}  # to each source there was
        self._nowhere: int | None = 0  # taken in, and not added to any of them; None: not known yet

    @property
    def num_consumed(self) -> int:
        """Env steps that updates took in, those among them that were lost with a buffer included; never falls."""
        return self.trained + self.dropped["buffer_lost"]

    @property
    def num_in_sources(self) -> int:
        """Env steps that the ranks' batch sources keep."""
        return sum(self._in_sources.values())

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

    def note_sources(self, learner_results: Sequence[Mapping[str, Any]]) -> None:
        """What the ranks' batch sources keep, by an update's results: of one that is gone, it is lost.

        Args:
            learner_results: Each rank's; of a rank whose results went with it, none.
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
        if len(held) < max(int(source["num_ranks"]) for source in sources):
            return  # another rank's results went with it; its source need not have
        self.lose_sources([source_id for source_id in self._in_sources if source_id not in held])
        # What a rank took in after its last report, and died with.
        nowhere = self.num_consumed - sum(self._added.values())
        if self._nowhere is not None and nowhere > self._nowhere:
            self._lose(nowhere - self._nowhere)
        self._nowhere = nowhere

    def lose_sources(self, source_ids: Iterable[str]) -> None:
        """These sources are gone, and what they kept with them."""
        for source_id in source_ids:
            self._lose(self._in_sources.pop(source_id, 0))

    def _lose(self, num_steps: int) -> None:
        lost = min(num_steps, self.trained)
        self.trained -= lost
        self.dropped["buffer_lost"] += lost

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

    def get_state(self) -> dict[str, Any]:
        """`to_dict`, and what the batch sources keep."""
        return {**self.to_dict(), "in_sources": self.num_in_sources}

    def set_state(self, state: dict[str, Any], *, with_sources: bool = False) -> None:
        """Become what `get_state` described; what was pending then is dropped ("restored").

        Args:
            state: Of `get_state`.
            with_sources: Whether what the sources kept comes back, too; else it is lost.
        """
        self.sampled = int(state["sampled"])
        self.trained = int(state["trained"])
        self.dropped = Counter({str(k): int(v) for k, v in state["dropped"].items()})
        self.drop_pending("restored")
        self._nowhere = None
        if not with_sources and not self._in_sources:  # those of this run, if there are any, live
            self._in_sources = {"restored": int(state.get("in_sources", 0))}
            self.lose_sources(["restored"])

    def __str__(self) -> str:
        dropped = ", ".join(f"{reason} {steps}" for reason, steps in sorted(self.dropped.items()) if steps)
        return (
            f"sampled {self.sampled} = trained {self.trained} + dropped {sum(self.dropped.values())}"
            + (f" ({dropped})" if dropped else "")
            + f" + pending {self.pending}"
        )
