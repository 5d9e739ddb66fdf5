"""Watches that tell when something counts as slow, hung or absent. Pure.

| watch             | what is missing                                                       |
|-------------------|-----------------------------------------------------------------------|
| ProgressWatch     | a worker's next step                                                  |
| SilenceWatch      | a peer's regular report                                               |
| SlowRankDetector  | a rank's entry into the collective in which all others wait           |
| ExpectedPeers     | the registration of a peer that the driver expects                    |
| StandstillWatch   | any progress towards an update                                        |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Literal

__all__ = [
    "Absence",
    "ExpectedPeers",
    "Health",
    "ProgressWatch",
    "SilenceWatch",
    "SlowRankDetector",
    "StandstillWatch",
]

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
        self._intervals: deque[float] = deque()
        self._sorted: list[float] = []
        self._stamp: int | None = None
        self._stamped_at = 0.0

    def stamp(self, progress: int, now: float) -> bool:
        """Record a progress counter and return whether it changed."""
        if progress == self._stamp:
            return False
        if self._stamp is not None:
            self._intervals.append(now - self._stamped_at)
            insort(self._sorted, self._intervals[-1])
            if len(self._intervals) > self._NUM_INTERVALS:
                del self._sorted[bisect_left(self._sorted, self._intervals.popleft())]
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
        median = self._sorted[len(self._sorted) // 2] if self._sorted else self._min_hung_s
        return "slow" if silent > 5 * median else "ok"

    def hung_after_s(self) -> float:
        """Return the number of seconds without progress that count as hung."""
        return max(self._first_timeout_s, self._limit_s()) if self._stamp == 0 else self._limit_s()

    def _limit_s(self) -> float:
        return self._timeout_s or max(self._min_hung_s, 20 * self.usual_s())

    def usual_s(self) -> float:
        """Return the 99th percentile of the intervals between progress stamps; 0 before the first."""
        return self._sorted[int(len(self._sorted) * 0.99)] if self._sorted else 0.0


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


# A peer reported this often counts as hung, even if it answers its supervisor.
_MAX_REPORTS = 10


@dataclass(slots=True)
class Absence:
    """A peer that has not registered.

    Attributes:
        since, reported_at: Times in seconds.
        num_reports: Number of times that `ExpectedPeers.overdue` has returned it.
    """

    since: float
    reported_at: float
    num_reports: int = 0

    @property
    def event(self) -> Literal["silent", "hung"]:
        """Event for the supervisor: "silent" asks whether the peer is alive, "hung" declares it hung."""
        return "silent" if self.num_reports <= _MAX_REPORTS else "hung"


class ExpectedPeers:
    """Compares the registered peers with those that the driver expects.

    A restarted broker knows no peers. Without this list it would never miss a process that froze during the restart.

    Args:
        after_s: Seconds without registration after which a peer is overdue, and again after each further `after_s`.
            Peers send HELLO about once per second.
    """

    def __init__(self, after_s: float = 3.0) -> None:
        self._after_s = after_s
        self._absent: dict[tuple[str, str], Absence] = {}

    def look(
        self, expected: Collection[tuple[str, str]], registered: Collection[tuple[str, str]], now: float
    ) -> None:
        """Update the absences from the expected and the registered peers, as (role, name)."""
        missing = set(expected).difference(registered)
        self._absent = {peer: self._absent.get(peer) or Absence(now, now) for peer in missing}

    def forgive(self, away_s: float, now: float) -> None:
        """Discount a time in which this process was stopped, so that nobody could register."""
        for absence in self._absent.values():
            absence.since = min(now, absence.since + away_s)
            absence.reported_at = min(now, absence.reported_at + away_s)

    def overdue(self, now: float) -> list[tuple[str, str, Absence]]:
        """Return (role, name, absence) of the peers to report to the supervisor now."""
        late = []
        for (role, name), absence in sorted(self._absent.items()):
            if now - absence.reported_at >= self._after_s:
                absence.reported_at = now
                absence.num_reports += 1
                late.append((role, name, absence))
        return late


class SlowRankDetector:
    """Detects the rank that all others wait for.

    All ranks of a generation enter the same collectives in the same order, and each one counts them. If a training
    rank's count is behind and no count changes, the other ranks are waiting for that rank.

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
