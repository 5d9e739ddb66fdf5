"""Supervision: restart decisions for supervised processes, with exponential back-off and a restart budget. Pure.

Time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Patience", "RestartPolicy", "Supervision"]


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

    Attributes:
        incarnation: Number of the current start, from 0, and so of the restarts decided so far.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
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

    def worked(self) -> None:
        """Record useful work, which clears earlier failures."""
        self._failures.clear()
        self._num_doublings = 0

    def failed(self, now: float) -> float | None:
        """Record a death or a failed start.

        Returns:
            Seconds until the restart, as the next `incarnation`; None: the restart budget is exhausted.
        """
        policy = self.policy
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


class Patience:
    """Time that a silent process has to answer before it is killed.

    Each kill doubles it, since the process may only have been slow. Useful work restores it.

    Args:
        first_s, max_s: Initial and largest value, seconds.
        restored_after: Number of calls of `worked` until it is `first_s` again.
    """

    def __init__(self, first_s: float = 1.0, max_s: float = 30.0, restored_after: int = 100) -> None:
        self.seconds: float = first_s
        self._first_s = first_s
        self._max_s = max_s
        self._restored_after = restored_after
        self._num_missing = 0

    def killed(self) -> None:
        """Record that the process did not answer in time and was killed."""
        self.seconds = min(2 * self.seconds, self._max_s)
        self._num_missing = self._restored_after

    def worked(self) -> None:
        """Record useful work."""
        self._num_missing -= 1
        if self._num_missing <= 0:
            self.seconds = self._first_s
