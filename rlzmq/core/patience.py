"""The one failure rule: who makes no progress for a time that follows its own pace hangs, and is replaced.

| who watches          | whom                  | what is missing       | at least                                |
|----------------------|-----------------------|-----------------------|-----------------------------------------|
| the actor system     | each process          | the answer to a beat  | `ANSWER_S`, at first `FIRST_S`          |
| a runner, a rank     | its own user code     | a return, a minibatch | `STEP_S`; a rank with peers `ANSWER_S`  |
| a peer, the broker   | the broker, its peers | any message           | `ANSWER_S`, and their options           |
| a socket             | another machine       | any byte              | `LINK_S`, at first `ANSWER_S`           |
| the driver           | the run               | any progress          | twice the others', and a minute         |

The limit is the least time, or `FACTOR` times the longest recent interval if that is more. Time for which the machine
gave no processor does not count: see `FairClock`, `CoreWait`.

A process that has ended is started again after `FIRST_DELAY_S`, doubled with each failure in a row up to `MAX_DELAY_S`
unless its own code ended it, and given up after `MAX_RESTARTS` of them without useful work in between (`Restarts`).
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice

__all__ = [
    "ANSWER_S",
    "FACTOR",
    "FIRST_DELAY_S",
    "FIRST_S",
    "HEARTBEAT_S",
    "LINK_S",
    "MAX_DELAY_S",
    "MAX_RESTARTS",
    "NARROW_PATH",
    "RESEND_S",
    "STEP_S",
    "TICK_S",
    "CoreWait",
    "FairClock",
    "Patience",
    "Restarts",
    "Retries",
    "Withheld",
]


FACTOR = 5.0
"""Multiple of the longest recent interval after which nothing more is expected."""

ANSWER_S, FIRST_S = 3.0, 30.0
"""For an answer that costs no work; until a process has worked, since imports may hold the interpreter's lock."""

STEP_S = 30.0
"""For a call of user code, which may take any time within reason."""

LINK_S = 1.2
"""For a byte from another machine, whose pings arrive every tenth of a second."""

MAX_RESTARTS, FIRST_DELAY_S, MAX_DELAY_S = 10, 0.1, 30.0
"""Restarts of a process in a row without useful work; seconds before the first, and at most before a later one."""

TICK_S, HEARTBEAT_S, RESEND_S = 0.05, 0.5, 2.0
"""Intervals of looking at timers, and of heartbeats; time after which a message without an answer is sent again."""

NARROW_PATH = (
    "connections open and small messages pass, but large ones are lost, again and again. Probably the path drops full "
    "packets because its MTU is smaller than that of the network interface (VPNs, tunnels, overlays). Look with "
    "ping -M do -s 1400 HOST; try a smaller MTU (ip link set dev NAME mtu 1280) on both machines, or let ICMP "
    "'fragmentation needed' pass"
)

_NUM_INTERVALS, _NUM_RECENT, _NUM_KNOWN = 256, 8, 4
_MOVES_UNTIL_TRUSTED = 50
_MAX_DOUBLINGS = 4
_MAX_KEYS = 4096


class Patience:
    """How long to wait for the next progress of one worker, from the intervals between earlier ones. Pure.

    Args:
        least_s: Lower bound of the limit. It doubles with each kill, since the worker may only have been slow, until
            the worker has made progress often enough.
        first_s: Lower bound until the pace is known, after a few intervals or useful work.

    Attributes:
        is_known: Whether the pace is known.
    """

    def __init__(self, least_s: float = ANSWER_S, first_s: float = 0.0) -> None:
        self._least_s = least_s
        self._first_s = first_s
        self._intervals: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self._moved_at: float | None = None
        self.is_known: bool = False
        self._num_doublings = self._num_doubted = 0

    def moved(self, now: float) -> None:
        """Record progress: an answer, a step, a message."""
        if self._moved_at is not None:
            self.note(now - self._moved_at)
        self._moved_at = now
        if self._num_doubted:
            self._num_doubted -= 1
            if not self._num_doubted:
                self._num_doublings = 0

    def note(self, seconds: float) -> None:
        """Record that progress took this long."""
        self._intervals.append(seconds)
        self.is_known |= len(self._intervals) >= _NUM_KNOWN

    def begin(self, now: float) -> None:
        """Restart the interval: nothing was expected until now."""
        self._moved_at = now

    def start_again(self) -> None:
        """Forget the pace: another incarnation of the worker starts."""
        self._intervals.clear()
        self._moved_at = None
        self.is_known = False

    def killed(self) -> None:
        """Record that the worker was killed for its silence; its next incarnation gets more time."""
        self._num_doublings = min(self._num_doublings + 1, _MAX_DOUBLINGS)
        self._num_doubted = _MOVES_UNTIL_TRUSTED
        self._moved_at = None

    def silent_s(self, now: float) -> float:
        """Return the number of seconds without progress."""
        return 0.0 if self._moved_at is None else now - self._moved_at

    @property
    def longest_s(self) -> float:
        """The longest recent interval; 0 before the first."""
        return max(self._intervals, default=0.0)

    @property
    def usual_s(self) -> float:
        """The median of the last few intervals; 0 before the first."""
        recent = sorted(islice(reversed(self._intervals), _NUM_RECENT))
        return recent[len(recent) // 2] if recent else 0.0

    @property
    def limit_s(self) -> float:
        """The number of seconds without progress that are too many."""
        least_s = self._least_s * 2.0**self._num_doublings
        return max(least_s, FACTOR * self.longest_s, 0.0 if self.is_known else self._first_s)

    def is_over(self, now: float) -> bool:
        """Return whether the worker has been silent for too long."""
        silent_s = self.silent_s(now)
        return silent_s >= self._least_s and silent_s >= self.limit_s


class FairClock:
    """Seconds in which this process ran: a gap between two readings longer than twice the period counts as that.

    So a watcher that was stopped, or that got no processor, blames nobody for the time that it missed.

    Args:
        period_s: Seconds between two readings, at most.
        clock: A monotonic clock.
    """

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = 2 * period_s
        self._clock = clock
        self._read_at = self._now = clock()

    def now(self) -> float:
        """Return the time; never decreases."""
        real = self._clock()
        self._now += min(real - self._read_at, self._most_s)
        self._read_at = real
        return self._now


class CoreWait:
    """Tells for how long processes wanted to run and got no core."""

    def __init__(self) -> None:
        self._pids: tuple[int, ...] = ()
        self._waits: dict[str, int] = {}

    def begin(self, *pids: int) -> None:
        """Count for these processes, from now on."""
        self._pids = pids
        self._waits = self._read()

    def take_s(self) -> float:
        """Return the seconds since the last call, of the thread that waited longest; 0 if the kernel does not tell."""
        before, self._waits = self._waits, self._read()
        return max((wait - before.get(task, wait) for task, wait in self._waits.items()), default=0) / 1e9

    def _read(self) -> dict[str, int]:
        waits = {}
        for pid in self._pids:
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file:
                        waits[task] = int(file.read().split()[1])
            except (OSError, ValueError, IndexError):
                pass  # it has ended, or a kernel without this file
        return waits


class Withheld:
    """Time of the current call of this process in which it was frozen, or it or its children got no core.

    Args:
        period_s: Seconds between two looks, at most.

    Attributes:
        seconds: How long that was.
    """

    _LONG_S = 1.0  # before, looking would cost more than it is worth

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._looked_at = time.monotonic()
        self._begun_at = 0.0
        self._core_wait: CoreWait | None = None
        self.seconds: float = 0.0

    def look(self, now: float, begun_at: float) -> None:
        """Look again, at the call that has made no progress since `begun_at`."""
        gap_s, self._looked_at = now - self._looked_at, now
        if begun_at != self._begun_at:
            self._begun_at, self._core_wait, self.seconds = begun_at, None, 0.0
        missed_s = max(0.0, min(gap_s, now - begun_at) - 2 * self._period_s)
        if self._core_wait is not None:
            missed_s = min(gap_s, max(missed_s, self._core_wait.take_s()))
        elif now - begun_at >= self._LONG_S:
            self._core_wait = CoreWait()
            self._core_wait.begin(os.getpid(), *_children())
        self.seconds += missed_s


def _children() -> list[int]:
    """Return this process's children; [] where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return list(map(int, file.read().split()))
    except OSError:
        return []


class Restarts:
    """The one rule of restarts, for one process: when it is started again, and when it is given up.

    Args:
        least_s: See `patience`.

    Attributes:
        incarnation: Number of the current start, from 0, and so of the restarts.
        num_failures: Number of deaths and failed starts in a row, without useful work in between.
        patience: How long its event loop may be blocked.
    """

    def __init__(self, least_s: float = ANSWER_S) -> None:
        self.patience: Patience = Patience(max(ANSWER_S, least_s), FIRST_S)
        self.incarnation: int = 0
        self.num_failures: int = 0

    def note_work(self) -> None:
        """Record useful work, which clears earlier failures."""
        self.num_failures = 0
        self.patience.is_known = True

    def failed(self, *, is_crash: bool = False) -> float | None:
        """Record a death or a failed start.

        Args:
            is_crash: Whether the process's own code ended it: no wait makes another end likelier.

        Returns:
            Seconds until the restart, as the next `incarnation`; None: it is given up.
        """
        self.patience.start_again()
        self.num_failures += 1
        if self.num_failures > MAX_RESTARTS:
            return None
        self.incarnation += 1
        return FIRST_DELAY_S if is_crash else min(FIRST_DELAY_S * 2.0 ** (self.num_failures - 1), MAX_DELAY_S)


class Retries:
    """Counts what peers repeat because no large message gets through.

    Args:
        limit: Number of tries in a row that are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: OrderedDict[object, int] = OrderedDict()

    def try_again(self, key: object) -> bool:
        """Count one try of a peer; return True at the one that is too many."""
        self._counts[key] = count = self._counts.pop(key, 0) + 1
        if len(self._counts) > _MAX_KEYS:
            self._counts.popitem(last=False)
        return count == self._limit

    def passed(self, key: object) -> None:
        """Record that a large message of this peer has arrived."""
        self._counts.pop(key, None)
