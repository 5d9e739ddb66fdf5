"""Watches of a process's own user code, which end the process when it hangs: environments, and what a learner calls.

They work without the broker, which may be restarting, and the driver, which may be training.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import DeadlineError
from rlzmq.core.patience import ANSWER_S, STEP_S, Patience
from rlzmq.core.process import LastWords, end_process
from rlzmq.core.tracebacks import place_in

__all__ = ["EXIT_HANGS", "EnvWatch", "UpdateWatch"]

EXIT_HANGS = 72
"""Exit code of a process whose user code hangs."""


class _HangWatch(CallWatch):
    """Ends the process when its user code has made no progress for too long.

    Args:
        config: Provides the limits.
        name: Name of the process, for messages.
        patience: Learns the pace.
        on_hang: Called once on the watching thread with a `DeadlineError`; None: the process exits with
            EXIT_HANGS. In both cases the stacks of all threads are written to stderr first.
    """

    def __init__(
        self,
        config: BaseConfig,
        name: str,
        patience: Patience,
        on_hang: Callable[[DeadlineError], None] | None,
    ) -> None:
        super().__init__(config.slow_call_warning_s)
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


class UpdateWatch(_HangWatch):
    """Watch of a learner's updates.

    Waiting for other ranks is no user code: a rank that hangs ends, and the others' collectives fail.

    Args:
        config, name, on_hang: See `_HangWatch`.
        progress: Returns a number that increases while the rank works.
        is_waiting: Whether it waits for other ranks.
        is_alone: Whether it has no other ranks: the run goes back when it ends, so it gets more time.
    """

    def __init__(
        self,
        config: BaseConfig,
        name: str,
        progress: Callable[[], int],
        is_waiting: Callable[[], bool],
        is_alone: Callable[[], bool],
        on_hang: Callable[[DeadlineError], None] | None = None,
    ) -> None:
        super().__init__(config, name, Patience(ANSWER_S, float(config.learner_timeout_s)), on_hang)
        self._is_alone = is_alone
        self._first_alone_s = float(config.process_start_timeout_s or math.inf)
        self._progress = progress
        self._is_waiting = is_waiting
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
        if self._is_alone():
            return max(limit_s, STEP_S if self._patience.is_known else self._first_alone_s)
        return limit_s

    def _look(self, now: float) -> str:
        calls, count = self._calls[-1:], self._progress()
        if not calls or self._is_waiting():
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
        config, name, on_hang: See `_HangWatch`.
    """

    def __init__(
        self, config: BaseConfig, name: str, on_hang: Callable[[DeadlineError], None] | None = None
    ) -> None:
        super().__init__(config, name, Patience(STEP_S), on_hang)
        self._step_timeout_s = float(config.env_step_timeout_s or 0.0)
        self._reset_timeout_s = float(config.env_reset_timeout_s or 0.0)
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
        is_reset = self._is_reset_now()
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
        what = self._under_way(is_reset)
        if self._num_returned != num_returned:
            return ""
        return self._judge(silent_s, limit_s, what, why)

    def _is_reset_now(self) -> bool:
        env = self._env
        inner: Any = getattr(getattr(env, "unwrapped", env), "is_resetting", False)
        is_reset = any(what == self.RESETS for what, *_ in self._calls[-1:])
        return is_reset or self._begins_episodes or inner is True

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

    def _under_way(self, is_reset: bool) -> str:
        if is_reset:
            return self.RESETS
        return self.STEPS if self._num_steps else "its first vector step"
