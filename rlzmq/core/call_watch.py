"""CallWatch: names calls of user code that do not return, with their stacks, from a thread of its own.

calling thread                            watching thread, ten times per second
call(…) … reset, step, step … ──────────► time since anything began or returned ──► a warning with the stack,
                                          again after twice that time, and so on; in the end `on_timeout`
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import numpy as np

from rlzmq.core.errors import DeadlineError
from rlzmq.core.patience import ANSWER_S, STEP_S, Patience, Withheld
from rlzmq.core.process import LastWords, end_process
from rlzmq.core.tracebacks import format_stack, place_in, user_errors

__all__ = ["EXIT_HANGS", "CallWatch", "EnvWatch", "UpdateWatch"]

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

    def call(
        self, what: str, coroutine: Awaitable[Any] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context for a call of user code, whose exceptions become errors (see `user_errors`).

        Args:
            what: Names the call in messages.
            coroutine: What the block awaits; its exceptions stay what they are.
        """
        return _Call(self, what, coroutine)

    def attend(self, env: Any) -> None:
        """Watch each reset and step of this vector env from now on; once per env."""
        if env is self._env or not self._is_on:
            return
        self._env = env
        self._begins_episodes = False
        # Vector envs of this process have an `is_resetting` flag.
        tells = isinstance(getattr(getattr(env, "unwrapped", env), "is_resetting", None), bool)
        for name in ("step", "step_sparse", "step_rows"):
            if (method := getattr(env, name, None)) is not None:
                setattr(env, name, self._counting_steps(method, tells))
        for name in ("reset", "reset_sparse"):
            if (method := getattr(env, name, None)) is not None:
                setattr(env, name, self._counting_resets(method))

    def _counting_steps(self, method: Callable[..., Any], tells: bool) -> Callable[..., Any]:
        clock = time.monotonic

        def step(*args: object, **kwargs: object) -> Any:
            result = method(*args, **kwargs)
            self._moved_at = clock()
            self._num_returned += 1
            self._num_steps += 1
            return result

        def step_elsewhere(*args: object, **kwargs: object) -> Any:
            result = step(*args, **kwargs)
            self._begins_episodes = bool(np.any(result[2]) or np.any(result[3]))
            return result

        return step if tells else step_elsewhere

    def _counting_resets(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def reset(*args: Any, **kwargs: Any) -> Any:
            with self.call(self.RESETS):
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
        limit = "" if self._timeout_s is None else f"the run ends when that is {self._timeout_s:g} s"
        self._warn_if_due(silent_s, calls[0][0], limit or "the run waits for it")
        if self._timeout_s is not None and silent_s >= self._timeout_s:
            return f"{calls[0][0]} has not returned for {silent_s:.1f} s"
        return ""

    def _silent_s(self, now: float) -> float:
        return now - self._moved_at - self._withheld.seconds

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


class _Call(user_errors):
    """The context of `CallWatch.call`. It is a class because it is entered in every update and every fragment."""

    def __init__(self, watch: CallWatch, what: str, coroutine: Awaitable[Any] | None) -> None:
        self._watch = watch
        self._what, self._coroutine = what, coroutine

    def __enter__(self) -> None:
        self._mine = self._what, threading.get_ident(), self._coroutine
        self._watch._moved_at = time.monotonic()
        self._watch._calls.append(self._mine)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watch._calls.remove(self._mine)
        self._watch._moved_at = time.monotonic()
        if error is not None and self._coroutine is None:
            super().__exit__(kind, error, trace)


def _watch(ref: weakref.ref[CallWatch], over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        watch = ref()
        if watch is None:
            return
        watch._turn()
        del watch


EXIT_HANGS = 72
"""Exit code of a process whose user code hangs."""


class _HangWatch(CallWatch):
    """Ends the process when its user code has made no progress for too long.

    Args:
        name: Name of the process, for messages.
        patience: Learns the pace.
        warn_after_s: See `CallWatch`.
        on_hang: See `EnvWatch`.
    """

    def __init__(
        self,
        name: str,
        patience: Patience,
        warn_after_s: float,
        on_hang: Callable[[DeadlineError], None] | None,
    ) -> None:
        super().__init__(warn_after_s)
        self._name = name
        self._patience = patience
        self._on_hang = on_hang

    def _judge(self, silent_s: float, limit_s: float, what: str, why: str) -> str:
        if silent_s >= limit_s:
            return f"{what} has not returned for {silent_s:.1f} s ({why})"
        self._warn_if_due(
            silent_s, f"{self._name}: {what}", f"it counts as hanging after {limit_s:.0f} s ({why})"
        )
        return ""

    def _end(self, hangs: str) -> None:
        sys.stdout.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        stack = self._stack()
        text = f"{self._name} hangs: {hangs}, at {place_in(stack)}"
        if self._on_hang is None:
            end_process(EXIT_HANGS, LastWords("", text, "".join(stack.format())))
        print(text, file=sys.__stderr__, flush=True)
        self._on_hang(DeadlineError(f"{text}. Its stack is on stderr."))


class WatchedRanks(Protocol):
    """What a watch reads of a learner's ranks: see `rlzmq.learners.ranks.Ranks`."""

    group: Any

    @property
    def progress(self) -> int:
        """A number that increases while the rank works."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""


class UpdateWatch(_HangWatch):
    """Watch of a learner's updates.

    Waiting for other ranks is no user code: a rank that hangs ends, and the others' collectives fail.

    Args:
        name, warn_after_s, on_hang: Name of the process, for messages; see `CallWatch` and `EnvWatch`.
        ranks: Tell whether the learner makes progress. One without others gets more time: the run goes back when it
            ends.
        learner_timeout_s: Least limit before the pace is known.
        process_start_timeout_s: The same for a rank without others; None: unlimited.
    """

    def __init__(
        self,
        name: str,
        ranks: WatchedRanks,
        *,
        learner_timeout_s: float,
        process_start_timeout_s: float | None,
        warn_after_s: float = 0.0,
        on_hang: Callable[[DeadlineError], None] | None = None,
    ) -> None:
        super().__init__(name, Patience(ANSWER_S, learner_timeout_s), warn_after_s, on_hang)
        self._ranks = ranks
        self._first_alone_s = process_start_timeout_s or math.inf
        self._seen = -1
        self.start(f"{name} update watch")

    @contextlib.contextmanager
    def call(self, what: str, coroutine: Awaitable[Any] | None = None) -> Iterator[None]:
        """See CallWatch.call; once an update was trained, its pace is known."""
        with super().call(what, coroutine):
            yield
            self._patience.note(time.monotonic() - self._moved_at)  # what follows the last minibatch
        self._patience.is_known = True

    @property
    def patience_s(self) -> float:
        """Seconds without progress after which an update hangs."""
        limit_s = self._patience.limit_s
        if self._ranks.group is None:
            return max(limit_s, STEP_S if self._patience.is_known else self._first_alone_s)
        return limit_s

    def _look(self, now: float) -> str:
        calls, count = self._calls[-1:], self._ranks.progress
        if not calls or self._ranks.is_waiting:
            self._seen = -1
            self._moved_at = now
        elif count != self._seen:
            if self._seen >= 0:
                self._patience.moved(now)
            else:
                self._patience.begin(self._moved_at)
            self._seen, self._moved_at = count, now
        if not calls:
            return ""
        return self._judge(
            self._silent_s(now), self.patience_s, calls[0][0], "by the pace of its minibatches"
        )


class EnvWatch(_HangWatch):
    """Watchdog of one env runner.

    Limits, in seconds since the last call returned: `env_reset_timeout_s` while environments are made or
    reset; in steps `env_step_timeout_s`, or the limit that `Patience` learns from earlier steps
    (`env_reset_timeout_s` before the first has returned). A vector step in which an episode begins has the limit of
    a reset: only during the reset itself if the environments are in this process, else for the whole vector step.

    Args:
        name: Name of the process, for messages.
        env_step_timeout_s, env_reset_timeout_s: See above; None: no fixed limit.
        warn_after_s: See `CallWatch`.
        on_hang: Called once on the watching thread with a `DeadlineError`; None: the process exits with
            EXIT_HANGS. In both cases the stacks of all threads are written to stderr first.
    """

    def __init__(
        self,
        name: str,
        *,
        env_step_timeout_s: float | None,
        env_reset_timeout_s: float | None,
        warn_after_s: float = 0.0,
        on_hang: Callable[[DeadlineError], None] | None = None,
    ) -> None:
        super().__init__(name, Patience(STEP_S), warn_after_s, on_hang)
        self._step_timeout_s = env_step_timeout_s or 0.0
        self._reset_timeout_s = env_reset_timeout_s or 0.0
        self._seen = 0
        self._had_reset = True
        self.start(f"{name} env watch")

    @property
    def progress(self) -> int:
        """A counter of vector steps and of resets of all environments."""
        return self._num_returned

    @property
    def pace_s(self) -> float:
        """The longest recent time between two vector steps."""
        return self._patience.longest_s

    # -- the watching thread --------------------------------------------------------------------

    def _look(self, now: float) -> str:
        if not self._calls:
            self._patience.begin(now)
            return super()._look(now)
        inner: Any = getattr(getattr(self._env, "unwrapped", self._env), "is_resetting", False)
        resets = any(what == self.RESETS for what, *_ in self._calls[-1:])
        is_reset = resets or self._begins_episodes or inner is True
        num_returned = self._num_returned
        returned_at = now - self._silent_s(now)
        if num_returned != self._seen:
            if self._had_reset:
                self._patience.begin(returned_at)  # the duration of a reset must not count as a step's
            self._patience.moved(returned_at)
            self._seen, self._had_reset = num_returned, is_reset
        self._had_reset |= is_reset
        limit_s, why = self._limit(is_reset)
        # Check again: it may have returned while this thread was not running.
        silent_s = self._silent_s(now)
        what = self.RESETS if is_reset else self.STEPS if self._num_steps else "its first vector step"
        if self._num_returned != num_returned:
            return ""
        return self._judge(silent_s, limit_s, what, why)

    def _limit(self, is_reset: bool) -> tuple[float, str]:
        step_s = self._step_timeout_s or self._patience.limit_s
        reset_s = max(self._reset_timeout_s, step_s)
        if is_reset:
            return reset_s, f"env_reset_timeout_s={self._reset_timeout_s:g}"
        if self._step_timeout_s:
            return step_s, f"env_step_timeout_s={self._step_timeout_s:g}"
        if not self._num_steps:
            return reset_s, f"env_reset_timeout_s={self._reset_timeout_s:g}, before the first step"
        return step_s, "by its own pace, since env_step_timeout_s is not set"
