"""ExpectedPeers: detection of expected peers that have not registered with the broker. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

__all__ = ["Absence", "ExpectedPeers"]


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
