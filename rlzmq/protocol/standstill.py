"""StandstillWatch: detection of a run that makes no progress towards a requested update. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["StandstillWatch"]


class StandstillWatch:
    """Detects a run without progress, for causes that no watch of a single process has found.

    A batch may take any time while envs step, and an update while ranks train. What counts is the time since the last
    progress. Time between two updates (evaluation, checkpoints, pauses) does not count.

    Args:
        min_s: Lower bound of the limit.
        num_paces: Multiple of the median duration of an update that the limit is at least.
        max_gap_s: Time without a call of `look` after which this process itself was stopped; the gap is then
            discounted.
    """

    _NUM_UPDATES = 64

    def __init__(self, *, min_s: float = 60.0, num_paces: float = 10.0, max_gap_s: float = 5.0) -> None:
        self._min_s = min_s
        self._num_paces = num_paces
        self._max_gap_s = max_gap_s
        self._updates_s: deque[float] = deque(maxlen=self._NUM_UPDATES)
        self._begun_at: float | None = None
        self._moved_at = 0.0
        self._looked_at = 0.0
        self._num_moves = -1

    def begin(self, now: float) -> None:
        """Record that an update was requested."""
        self._begun_at = self._moved_at = self._looked_at = now

    def end(self, now: float) -> None:
        """Record that the update was committed or abandoned."""
        if self._begun_at is not None:
            self._updates_s.append(now - self._begun_at)
        self._begun_at = None

    def look(self, num_moves: int, now: float) -> None:
        """Record the progress counter. Call about once per second.

        Args:
            num_moves: A counter that changes with any progress towards the update.
            now: Seconds.
        """
        if now - self._looked_at > self._max_gap_s:
            self._moved_at += now - self._looked_at
        self._looked_at = now
        if num_moves != self._num_moves:
            self._num_moves, self._moved_at = num_moves, now

    def still_s(self, now: float) -> float:
        """Return the number of seconds since the last progress; 0 between two updates."""
        return now - self._moved_at if self._begun_at is not None else 0.0

    def limit_s(self, patience_s: float) -> float:
        """Return the number of seconds without progress that count as a standstill.

        Args:
            patience_s: How long any process working on the update may be silent before it counts as hung.
        """
        pace_s = median(self._updates_s) if self._updates_s else 0.0
        return max(self._min_s, self._num_paces * pace_s, 2 * patience_s)

    def is_still(self, patience_s: float, now: float) -> bool:
        """Return whether the run stands still. True is returned again only after the limit has passed again."""
        if self.still_s(now) < self.limit_s(patience_s):
            return False
        self._moved_at = now
        return True
