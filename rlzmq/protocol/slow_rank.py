"""SlowRankDetector: detection of a learner rank that blocks the others in a collective. Pure.

All ranks of a generation enter the same collectives in the same order, and each one counts them. If a training rank's
count is behind and no count changes, the other ranks are waiting for that rank.
"""

from __future__ import annotations

from collections import deque

__all__ = ["SlowRankDetector"]


class SlowRankDetector:
    """Detects the rank that all others wait for.

    The limit adapts to the group: `min_s`, or ten times the longest recent wait if that is more; `first_s` until
    every rank has trained an update (compilers and caches warm up). Each detection doubles `min_s` until the group
    has trained 50 more updates, so that a group of uneven ranks is not killed one by one.

    Args:
        min_s, first_s: Limits in seconds.
    """

    _NUM_WAITS = 256
    _UPDATES_UNTIL_TRUSTED = 50
    _MAX_MIN_S = 60.0

    def __init__(self, *, min_s: float, first_s: float) -> None:
        self._base_s = self._min_s = min_s
        self._first_s = first_s
        self._waits: deque[float] = deque(maxlen=self._NUM_WAITS)
        self._counts: dict[str, int] = {}
        self._training: set[str] = set()
        self._first_update: dict[str, int] = {}
        self._next_update: dict[str, int] = {}
        self._foremost = -1
        self._moved_at = 0.0
        self._trusted_from: int | None = None

    def begin(self) -> None:
        """Reset all counts for a new generation."""
        self._counts.clear()
        self._training.clear()
        self._foremost = -1

    def heard(self, uuid: str, count: int, next_update: int, now: float, *, is_training: bool) -> None:
        """Record the report of a rank of the current generation.

        Args:
            uuid: Id of the rank's process.
            count: Number of collectives that it has entered in this generation.
            next_update: First update that it has not trained.
            now: Seconds.
            is_training: Whether it is training an update.
        """
        (self._training.add if is_training else self._training.discard)(uuid)
        self._first_update.setdefault(uuid, next_update)
        self._next_update[uuid] = next_update
        before = self._counts.get(uuid, count)
        self._counts[uuid] = count
        if count > self._foremost:
            self._foremost, self._moved_at = count, now
        elif before < count == self._foremost:
            self._waits.append(now - self._moved_at)
        if self._trusted_from is not None and next_update >= self._trusted_from:
            self._min_s, self._trusted_from = self._base_s, None

    def forgive(self, away_s: float, now: float) -> None:
        """Discount a time in which the watching process was stopped."""
        self._moved_at = min(now, self._moved_at + away_s)

    def limit_s(self) -> float:
        """Return how long the others wait before the rank counts as hung, in seconds."""
        learnt = max(self._min_s, 10 * max(self._waits, default=0.0))
        if any(self._next_update[uuid] <= self._first_update[uuid] for uuid in self._counts):
            return max(self._first_s, learnt)
        return learnt

    def hung(self, now: float) -> list[str]:
        """Return the ranks that the others have waited for too long, each one once per wait."""
        behind = [uuid for uuid in self._training if self._counts[uuid] < self._foremost]
        if not behind or now - self._moved_at < self.limit_s():
            return []
        newest = max(self._next_update[uuid] for uuid in self._counts)
        self._min_s = min(2 * self._min_s, self._MAX_MIN_S)
        self._trusted_from = newest + self._UPDATES_UNTIL_TRUSTED
        self._moved_at = now
        return behind
