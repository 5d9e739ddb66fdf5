"""Supervision: restart decisions for supervised processes, with exponential back-off and a restart budget. Pure.

Time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rlzmq.core.patience import ANSWER_S, FIRST_S, Patience

__all__ = ["RestartPolicy", "Supervision"]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how soon a dead process is restarted.

    Attributes:
        max_restarts: Restarts allowed within any ``window_s`` seconds; one more death gives up. 0: fail fast.
        window_s: Length of the window in seconds.
        first_delay_s: Delay before the first restart; doubled by each further one.
        max_delay_s: Upper bound of the delay. After a life of ``window_s`` the delay is ``first_delay_s`` again.
    """

    max_restarts: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, not {self.max_restarts}")
        for name in ("window_s", "first_delay_s", "max_delay_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


class Supervision:
    """Restart state of one supervised process.

    Args:
        policy: How often it is restarted.
        least_s: See `patience`.

    Attributes:
        incarnation: Number of the current start, from 0, and so of the restarts decided so far.
        patience: How long its event loop may be blocked.
    """

    def __init__(self, policy: RestartPolicy, least_s: float = ANSWER_S) -> None:
        self.policy = policy
        self.patience: Patience = Patience(max(ANSWER_S, least_s), FIRST_S)
        self.incarnation: int = 0
        self._failures: deque[float] = deque()
        self._num_doublings = 0
        self._started_at: float | None = None

    @property
    def num_failures(self) -> int:
        """Number of deaths that count: within the last ``window_s`` seconds, and since the last useful work."""
        return len(self._failures)

    def started(self, now: float) -> None:
        """Record a successful start (the constructor returned)."""
        self._started_at = now

    def note_work(self) -> None:
        """Record useful work, which clears earlier failures."""
        self._failures.clear()
        self._num_doublings = 0
        self.patience.is_known = True

    def failed(self, now: float) -> float | None:
        """Record a death or a failed start.

        Returns:
            Seconds until the restart, as the next `incarnation`; None: the restart budget is exhausted.
        """
        policy = self.policy
        self.patience.start_again()
        if self._started_at is not None and now - self._started_at >= policy.window_s:
            self._num_doublings = 0
        self._started_at = None
        self._failures.append(now)
        while now - self._failures[0] > policy.window_s:
            self._failures.popleft()
        if len(self._failures) > policy.max_restarts:
            return None
        # The exponent is limited, because many doublings would overflow a float.
        delay_s = min(policy.first_delay_s * 2.0 ** min(self._num_doublings, 64), policy.max_delay_s)
        self._num_doublings += 1
        self.incarnation += 1
        return delay_s
