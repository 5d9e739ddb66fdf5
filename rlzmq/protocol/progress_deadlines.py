"""When a worker that shows no progress, or says nothing, counts as slow or hung. Pure."""

from __future__ import annotations

from collections import deque
from typing import Literal

__all__ = ["Health", "ProgressWatch", "SilenceWatch"]

Health = Literal["ok", "slow", "hung"]


class ProgressWatch:
    """Tells slow from hung by the intervals between progress stamps of one worker.

    Long steps are normal, silence is not: the limits follow what the worker itself has shown.
    slow: 5 times its median interval; hung: 20 times its longest of 99 in 100, at least 30 s; or, if
    given, `timeout_s` for both.

    Args:
        timeout_s: Fixed limit for hung instead of the learnt one; 0 for none.
        min_hung_s: The learnt limit is never below it.
        first_timeout_s: The limit is never below it before the first progress (at stamp 0): resets, for
            example, take longer than steps.
    """

    _NUM_INTERVALS = 256

    def __init__(
        self, timeout_s: float = 0.0, min_hung_s: float = 30.0, first_timeout_s: float = 0.0
    ) -> None:
        self._timeout_s = timeout_s
        self._min_hung_s = min_hung_s
        self._first_timeout_s = first_timeout_s
        self._intervals: deque[float] = deque(maxlen=self._NUM_INTERVALS)
        self._stamp: int | None = None
        self._stamped_at = 0.0

    def stamp(self, progress: int, now: float) -> bool:
        """A progress counter was seen; returns whether it moved."""
        if progress == self._stamp:
            return False
        if self._stamp is not None:
            self._intervals.append(now - self._stamped_at)
        self._stamp, self._stamped_at = progress, now
        return True

    def idle(self, now: float) -> None:
        """The worker has nothing to do: its silence means nothing."""
        self._stamped_at = now

    def forgive(self, away_s: float, now: float) -> None:
        """Whoever watches was away for so long: that was nobody's silence."""
        self._stamped_at = min(now, self._stamped_at + away_s)

    def health(self, now: float) -> Health:
        """What the time since the last progress means."""
        if self._stamp is None:
            return "ok"
        silent = now - self._stamped_at
        if silent >= self.hung_after_s():
            return "hung"
        intervals = sorted(self._intervals)
        median = intervals[len(intervals) // 2] if intervals else self._min_hung_s
        return "slow" if silent > 5 * median else "ok"

    def hung_after_s(self) -> float:
        """Seconds of silence that count as hung."""
        return max(self._first_timeout_s, self._limit_s()) if self._stamp == 0 else self._limit_s()

    def _limit_s(self) -> float:
        return self._timeout_s or max(self._min_hung_s, 20 * self.usual_s())

    def usual_s(self) -> float:
        """The longest of 99 in 100 intervals between progress stamps; 0 as long as nothing is known."""
        intervals = sorted(self._intervals)
        return intervals[min(len(intervals) - 1, int(len(intervals) * 0.99))] if intervals else 0.0


class SilenceWatch:
    """Tells whether a peer that reports regularly is later than it has ever been.

    A thread that holds the interpreter's lock for long keeps its process from reporting. The limit follows
    what the peer itself has shown: `min_s`, or five times its longest delay of late, whichever is more.

    Args:
        beat_s: How often it reports.
        min_s: The limit is never below it.
    """

    _NUM_DELAYS = 64

    def __init__(self, beat_s: float, min_s: float) -> None:
        self._beat_s = beat_s
        self._min_s = min_s
        self._delays: deque[float] = deque(maxlen=self._NUM_DELAYS)
        self._heard_at: float | None = None

    def heard(self, now: float) -> None:
        """It said something."""
        if self._heard_at is not None:
            self._delays.append(max(0.0, now - self._heard_at - self._beat_s))
        self._heard_at = now

    def forgive(self, away_s: float, now: float) -> None:
        """Whoever watches was away for so long: that was nobody's silence."""
        if self._heard_at is not None:
            self._heard_at = min(now, self._heard_at + away_s)

    def limit_s(self) -> float:
        """Seconds of silence that are too long."""
        return max(self._min_s, self._beat_s + 5 * max(self._delays, default=0.0))

    def is_late(self, now: float) -> bool:
        """Whether it should have said something by now."""
        return self._heard_at is not None and now - self._heard_at >= self.limit_s()
