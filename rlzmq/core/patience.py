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

`CallWatch` names calls of user code that do not return, with their stacks, from a thread of its own:

calling thread                            watching thread, ten times per second
call(…) … reset, step, step … ──────────► time since anything began or returned ──► a warning with the stack,
                                          again after twice that time, and so on; in the end `on_timeout`
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from rlzmq.core.tracebacks import format_stack, place_in, user_errors

__all__ = [
    "ANSWER_S",
    "FACTOR",
    "FIRST_S",
    "LINK_S",
    "STEP_S",
    "CallWatch",
    "CoreWait",
    "FairClock",
    "Patience",
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

_NUM_INTERVALS, _NUM_RECENT, _NUM_KNOWN = 256, 8, 4
_MOVES_UNTIL_TRUSTED = 50
_MAX_DOUBLINGS = 4


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


_log = logging.getLogger("rlzmq.calls")

_LOOK_S = 0.1


class CallWatch:
    """Watches the calls of user code of one run in one process.

    A call inside of another one, and each reset and step of an attended environment, counts as progress. Time does not
    count for which this process was frozen, or got no core.

    Args:
        warn_after_s: Seconds without progress after which a warning is logged; again after twice the time, and so on.
            0: no warnings.
        timeout_s: Seconds without progress after which `on_timeout` is called. None: never.
        on_timeout: Called once, on the watching thread, with a text that names the call.
    """

    RESETS = "making or resetting its environments"
    STEPS = "a vector step"

    def __init__(
        self,
        warn_after_s: float = 0.0,
        timeout_s: float | None = None,
        on_timeout: Callable[[str], None] | None = None,
    ) -> None:
        self._warn_after_s = warn_after_s
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._is_on = False
        self._env: Any = None
        # Written by the calling threads, read by the watching one.
        # What, on which thread, and what it waits for if it is a coroutine; the innermost last.
        self._calls: list[tuple[str, int, Awaitable[Any] | None]] = []
        self._moved_at = 0.0
        self._num_returned = 0
        self._num_steps = 0
        self._begins_episodes = False
        # Used by the watching thread only.
        self._warned_at_s = 0.0
        self._withheld = Withheld(_LOOK_S)
        self._over = threading.Event()

    def start(self, name: str) -> None:
        """Start the watching thread, which ends with this object."""
        self._is_on = True
        threading.Thread(target=_watch, args=(weakref.ref(self), self._over), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._over.set()

    # -- the calling threads --------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, what: str, coroutine: Awaitable[Any] | None = None) -> Iterator[None]:
        """Return a context for a call of user code, whose exceptions become errors (see `user_errors`).

        Args:
            what: Names the call in messages.
            coroutine: What the block awaits; its exceptions stay what they are.
        """
        mine = what, threading.get_ident(), coroutine
        self._moved_at = time.monotonic()
        self._calls.append(mine)
        try:
            with user_errors() if coroutine is None else contextlib.nullcontext():
                yield
        finally:
            self._calls.remove(mine)
            self._moved_at = time.monotonic()

    def work(self, *, is_reset: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context for calls of environments: a constructor or a reset, or steps and resets."""
        return self.call(self.RESETS if is_reset else self.STEPS)

    def attend(self, env: Any) -> None:
        """Watch each reset and step of this vector env from now on; once per env."""
        if env is self._env or not self._is_on:
            return
        self._env = env
        self._begins_episodes = False
        # Vector envs of this process have an `is_resetting` flag.
        tells = isinstance(getattr(getattr(env, "unwrapped", env), "is_resetting", None), bool)
        for name in ("step", "step_sparse"):
            if (method := getattr(env, name, None)) is not None:
                setattr(env, name, self._counting_steps(method, tells))
        for name in ("reset", "reset_sparse"):
            if (method := getattr(env, name, None)) is not None:
                setattr(env, name, self._counting_resets(method))

    def _counting_steps(self, method: Callable[..., Any], tells: bool) -> Callable[..., Any]:
        import numpy as np  # not above: the fork server starts without it

        clock = time.monotonic

        def step(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._moved_at = clock()
            self._num_returned += 1
            self._num_steps += 1
            return result

        def step_elsewhere(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._begins_episodes = bool(np.any(result[2]) or np.any(result[3]))
            return result

        return step if tells else step_elsewhere

    def _counting_resets(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def reset(*args: Any, **kwargs: Any) -> Any:
            with self.work(is_reset=True):
                result = method(*args, **kwargs)
            self._num_returned += 1
            self._begins_episodes = False
            return result

        return reset

    # -- the watching thread --------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.monotonic()
        self._withheld.look(now, self._moved_at if self._calls else now)
        if (hangs := self._look(now)) and not self._over.is_set():
            self._over.set()
            self._end(hangs)

    def _look(self, now: float) -> str:
        """Warn if nothing moves; return a description of what has taken too long, or ""."""
        calls = self._calls[-1:]
        if not calls:
            self._warned_at_s = 0.0
            return ""
        silent_s = self._silent_s(now)
        self._warn_if_due(silent_s, calls[0][0], self._consequence())
        if self._timeout_s is not None and silent_s >= self._timeout_s:
            return f"{calls[0][0]} has not returned for {silent_s:.1f} s"
        return ""

    def _silent_s(self, now: float) -> float:
        return now - self._moved_at - self._withheld.seconds

    def _consequence(self) -> str:
        if self._timeout_s is None:
            return "the run waits for it"
        return f"the run ends when that is {self._timeout_s:g} s"

    def _warn_if_due(self, silent_s: float, what: str, consequence: str) -> None:
        if silent_s < self._warned_at_s:  # something has moved since
            self._warned_at_s = 0.0
        due_s = 2 * self._warned_at_s or self._warn_after_s
        if due_s and silent_s >= due_s:
            self._warned_at_s = silent_s
            stack = self._stack()
            text = "%s has not returned for %.0f s; %s. It is at %s:\n%s"
            _log.warning(text, what, silent_s, consequence, place_in(stack), format_stack(stack))

    def _stack(self) -> traceback.StackSummary:
        """Return the stack of the innermost call's thread or coroutine; empty if it has returned in the meantime."""
        frames: list[tuple[FrameType, int]] = []
        for _, thread, coroutine in self._calls[-1:]:
            if coroutine is None and (frame := sys._current_frames().get(thread)) is not None:
                return traceback.extract_stack(frame)
            while (frame := getattr(coroutine, "cr_frame", None)) is not None:
                frames.append((frame, frame.f_lineno))
                coroutine = getattr(coroutine, "cr_await", None)
        return traceback.StackSummary.extract(frames)

    def _end(self, hangs: str) -> None:
        stack = self._stack()
        if self._on_timeout is not None:
            self._on_timeout(f"{hangs}, at {place_in(stack)}:\n{format_stack(stack)}")


def _watch(ref: weakref.ref[CallWatch], over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        watch = ref()
        if watch is None:
            return
        watch._turn()
        del watch
