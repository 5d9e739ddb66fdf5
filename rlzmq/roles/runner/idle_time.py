"""IdleTime: what an env runner waits for between two leases."""

from __future__ import annotations

from rlzmq.core import trace
from rlzmq.core.stage_timers import FRAGMENT_DELIVERY_TIMER, WEIGHTS_WAIT_TIMER, StageTimers

__all__ = ["IdleTime"]


class IdleTime:
    """Divides the time between two leases: delivery of the fragment, weights that are still missing, and the rest.

    Args:
        timers: Receives one call of each per lease.
    """

    def __init__(self, timers: StageTimers) -> None:
        self._timers = timers
        self._ended_at: float | None = None  # end of the last lease, while none is sampled
        self._delivered_at: float | None = None
        self._weights_missed_at: float | None = None
        self._sent_at: float | None = None

    def lease_ended(self, now: float) -> None:
        """Note that a lease was sampled and its fragment passed on; times are seconds of one clock."""
        self._ended_at = now
        self._delivered_at = self._weights_missed_at = self._sent_at = None

    def sent(self, now: float) -> None:
        """Note that the fragment was sent; stages of the trace begin after that."""
        self._sent_at = now

    def look(self, now: float, *, has_undelivered: bool, lacks_weights: bool) -> None:
        """Note what the runner waits for; called after every event."""
        if self._ended_at is None:
            return
        if self._delivered_at is None and not has_undelivered:
            self._delivered_at = now
        if self._weights_missed_at is None and lacks_weights:
            self._weights_missed_at = now

    @property
    def waits_for_delivery(self) -> bool:
        """Whether no lease is sampled and the last fragment was not accepted yet."""
        return self._ended_at is not None and self._delivered_at is None

    def lease_begins(self, now: float) -> None:
        """Add what was waited for since the last lease."""
        if self._ended_at is None:
            return
        delivered_at = now if self._delivered_at is None else self._delivered_at
        self._timers.add(FRAGMENT_DELIVERY_TIMER, delivered_at - self._ended_at)
        missed_at = now if self._weights_missed_at is None else max(self._weights_missed_at, delivered_at)
        self._timers.add(WEIGHTS_WAIT_TIMER, now - missed_at)
        if trace.is_on and self._sent_at is not None:
            trace.span("deliver", self._sent_at, max(delivered_at, self._sent_at))
            trace.span("weights", max(missed_at, self._sent_at), now)
        self._ended_at = None
