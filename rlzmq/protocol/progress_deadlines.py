"""Deadlines after which a worker without progress, or a silent peer, counts as slow or hung. Pure."""

from __future__ import annotations

from collections import deque
from typing import Literal

__all__ = ["Health", "ProgressWatch", "SilenceWatch"]

Health = Literal["ok", "slow", "hung"]


class ProgressWatch:
    """Classifies a worker as ok, slow or hung from the intervals between its progress stamps.

    The limits adapt to the worker, since long steps are normal. slow: 5 times its median interval; hung: 20 times the
    99th percentile of its intervals, at least `min_hung_s`, or `timeout_s` if given.

    Args:
        timeout_s: Fixed limit for hung, instead of the learnt one; 0: none.
        min_hung_s: Lower bound of the learnt limit.
        first_timeout_s: Lower bound of the limit before the first progress (at stamp 0), since e.g. resets take
            longer than steps.
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
        """Record a progress counter and return whether it changed."""
        if progress == self._stamp:
            return False
        if self._stamp is not None:
            self._intervals.append(now - self._stamped_at)
        self._stamp, self._stamped_at = progress, now
        return True

    def idle(self, now: float) -> None:
        """Restart the interval, since the worker has nothing to do."""
        self._stamped_at = now

    def forgive(self, away_s: float, now: float) -> None:
        """Discount a time in which the watching process was stopped."""
        self._stamped_at = min(now, self._stamped_at + away_s)

    def health(self, now: float) -> Health:
        """Return the worker's health from the time since its last progress."""
        if self._stamp is None:
            return "ok"
        silent = now - self._stamped_at
        if silent >= self.hung_after_s():
            return "hung"
        intervals = sorted(self._intervals)
        median = intervals[len(intervals) // 2] if intervals else self._min_hung_s
        return "slow" if silent > 5 * median else "ok"

    def hung_after_s(self) -> float:
        """Return the number of seconds without progress that count as hung."""
        return max(self._first_timeout_s, self._limit_s()) if self._stamp == 0 else self._limit_s()

    def _limit_s(self) -> float:
        return self._timeout_s or max(self._min_hung_s, 20 * self.usual_s())

    def usual_s(self) -> float:
        """Return the 99th percentile of the intervals between progress stamps; 0 before the first."""
        intervals = sorted(self._intervals)
        return intervals[int(len(intervals) * 0.99)] if intervals else 0.0


class SilenceWatch:
    """Detects a peer whose regular report is overdue.

    A thread that holds the GIL for long delays its process's reports, so the limit adapts to the peer: it is `min_s`,
    or five times its longest recent delay if that is more.

    Args:
        beat_s: Interval of its reports.
        min_s: Lower bound of the limit.
    """

    _NUM_DELAYS = 64

    def __init__(self, beat_s: float, min_s: float) -> None:
        self._beat_s = beat_s
        self._min_s = min_s
        self._delays: deque[float] = deque(maxlen=self._NUM_DELAYS)
        self._heard_at: float | None = None

    def heard(self, now: float) -> None:
        """Record a message from the peer."""
        if self._heard_at is not None:
            self._delays.append(max(0.0, now - self._heard_at - self._beat_s))
        self._heard_at = now

    def forgive(self, away_s: float, now: float) -> None:
        """Discount a time in which the watching process was stopped."""
        if self._heard_at is not None:
            self._heard_at = min(now, self._heard_at + away_s)

    def limit_s(self) -> float:
        """Return the number of seconds of silence after which the peer is late."""
        return max(self._min_s, self._beat_s + 5 * max(self._delays, default=0.0))

    def is_late(self, now: float) -> bool:
        """Return whether a report is overdue."""
        return self._heard_at is not None and now - self._heard_at >= self.limit_s()
