"""When training as a whole stands still: updates are asked for, and nothing moves towards the next one. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["StandstillWatch"]


class StandstillWatch:
    """Tells slow from stuck, whatever the cause: the last resort, where every watch of one process has found nothing.

    A batch may take as long as it likes while envs step, and an update while ranks take steps: what counts is the
    time since the last of either. Nothing counts between two updates (evaluation, checkpoints, pauses).

    Args:
        min_s: The limit is never below it.
        num_paces: Nor below so many times the median update.
        max_gap_s: Where nobody looked for so long, this process was stopped or blocked itself: nobody's silence.
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
        """An update is asked for."""
        self._begun_at = self._moved_at = self._looked_at = now

    def end(self, now: float) -> None:
        """It is committed, or given up."""
        if self._begun_at is not None:
            self._updates_s.append(now - self._begun_at)
        self._begun_at = None

    def look(self, num_moves: int, now: float) -> None:
        """About once per second.

        Args:
            num_moves: Changes whenever anybody does something for the update.
            now: Seconds.
        """
        if now - self._looked_at > self._max_gap_s:
            self._moved_at += now - self._looked_at
        self._looked_at = now
        if num_moves != self._num_moves:
            self._num_moves, self._moved_at = num_moves, now

    def still_s(self, now: float) -> float:
        """Seconds since anything moved; 0 between two updates."""
        return now - self._moved_at if self._begun_at is not None else 0.0

    def limit_s(self, patience_s: float) -> float:
        """Seconds after which it counts as standing still.

        Args:
            patience_s: How long one of those who are at work may be silent without being taken for hung.
        """
        pace_s = median(self._updates_s) if self._updates_s else 0.0
        return max(self._min_s, self._num_paces * pace_s, 2 * patience_s)

    def is_still(self, patience_s: float, now: float) -> bool:
        """Whether it stands still; once it was told, as long again passes until it is told again."""
        if self.still_s(now) < self.limit_s(patience_s):
            return False
        self._moved_at = now
        return True
