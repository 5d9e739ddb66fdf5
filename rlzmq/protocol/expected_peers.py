"""Which peers should be registered with the broker, and are not. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

__all__ = ["Absence", "RollCall"]


# Whoever was told of so often hangs, whatever it answers.
_MAX_REPORTS = 10


@dataclass(slots=True)
class Absence:
    """A peer that has not registered.

    Attributes:
        since, reported_at: Seconds.
        num_reports: How often `RollCall.overdue` told of it.
    """

    since: float
    reported_at: float
    num_reports: int = 0

    @property
    def event(self) -> Literal["silent", "hung"]:
        """What to tell a supervisor: ask whether it lives, or do not believe it any more."""
        return "silent" if self.num_reports <= _MAX_REPORTS else "hung"


class RollCall:
    """Holds those who are registered against those whom the driver expects.

    A broker misses only peers that registered with it. One that was restarted knows nobody: a process that was
    frozen meanwhile would never be missed.

    Args:
        after_s: Whoever has not registered by then is overdue, and again after as long. Peers say HELLO about
            once per second.
    """

    def __init__(self, after_s: float = 3.0) -> None:
        self._after_s = after_s
        self._absent: dict[tuple[str, str], Absence] = {}

    def look(
        self, expected: Collection[tuple[str, str]], registered: Collection[tuple[str, str]], now: float
    ) -> None:
        """Who is expected and who is there, as (role, name)."""
        missing = set(expected).difference(registered)
        self._absent = {peer: self._absent.get(peer) or Absence(now, now) for peer in missing}

    def forgive(self, away_s: float, now: float) -> None:
        """Whoever looks was away for so long: nobody could register."""
        for absence in self._absent.values():
            absence.since = min(now, absence.since + away_s)
            absence.reported_at = min(now, absence.reported_at + away_s)

    def overdue(self, now: float) -> list[tuple[str, str, Absence]]:
        """(role, name, absence) of whom to tell a supervisor now."""
        late = []
        for (role, name), absence in sorted(self._absent.items()):
            if now - absence.reported_at >= self._after_s:
                absence.reported_at = now
                absence.num_reports += 1
                late.append((role, name, absence))
        return late
