"""Watchdog that ends a runner's process when its environments hang in a constructor, a reset or a step.

It works without the broker, which may be restarting, and the driver, which may be training.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import DeadlineError
from rlzmq.core.last_words import LastWords, end_process
from rlzmq.core.tracebacks import place_in
from rlzmq.protocol.progress_deadlines import ProgressWatch

__all__ = ["EXIT_ENV_HANGS", "EnvWatch"]

EXIT_ENV_HANGS = 72
"""Exit code of a runner's process whose environments hang."""


class EnvWatch(CallWatch):
    """Watchdog of one env runner.

    Limits, in seconds since the last call returned: `env_reset_timeout_s` while environments are made or
    reset; in steps `env_step_timeout_s`, or the limit that `ProgressWatch` learns from earlier steps
    (`env_reset_timeout_s` before the first has returned). A vector step in which an episode begins has the limit of
    a reset: only during the reset itself if the environments are in this process, else for the whole vector step.

    Args:
        config: Provides the limits.
        name: Name of the runner, for messages.
        on_hang: Called once on the watching thread with a `DeadlineError`; None: the process exits with
            EXIT_ENV_HANGS. In both cases the stacks of all threads are written to stderr first.
    """

    def __init__(
        self, config: BaseConfig, name: str, on_hang: Callable[[DeadlineError], None] | None = None
    ) -> None:
        super().__init__(config.slow_call_warning_s)
        self._name = name
        self._on_hang = on_hang
        self._step_timeout_s = float(config.env_step_timeout_s or 0.0)
        self._reset_timeout_s = float(config.env_reset_timeout_s or 0.0)
        self._pace = ProgressWatch(self._step_timeout_s)
        self._seen = 0
        self._had_reset = True
        self.start(f"{name} env watch")

    @property
    def progress(self) -> int:
        """A counter of vector steps and of resets of all environments."""
        return self._num_returned

    # -- the watching thread --------------------------------------------------------------------

    def _look(self, now: float) -> str:
        if not self._calls:
            self._pace.idle(now)
            return super()._look(now)
        is_reset = self._is_reset_now()
        num_returned = self._num_returned
        returned_at = now - self._silent_s(now)
        if num_returned != self._seen:
            if self._had_reset:
                self._pace.idle(returned_at)  # the duration of a reset must not count as a step's
            self._pace.stamp(num_returned, returned_at)
            self._seen, self._had_reset = num_returned, is_reset
        self._had_reset |= is_reset
        limit_s, why = self._limit(is_reset)
        # Check again: it may have returned while this thread was not running.
        silent_s = self._silent_s(now)
        what = self._under_way(is_reset)
        if silent_s >= limit_s and self._num_returned == num_returned:
            return f"{what} has not returned for {silent_s:.1f} s ({why})"
        self._warn_if_due(
            silent_s, f"{self._name}: {what}", f"it counts as hanging after {limit_s:.0f} s ({why})"
        )
        return ""

    def _is_reset_now(self) -> bool:
        env = self._env
        inner: Any = getattr(getattr(env, "unwrapped", env), "is_resetting", False)
        is_reset = any(what == self.RESETS for what, *_ in self._calls[-1:])
        return is_reset or self._begins_episodes or inner is True

    def _limit(self, is_reset: bool) -> tuple[float, str]:
        step_s = self._pace.hung_after_s()
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

    def _end(self, hangs: str) -> None:
        sys.stdout.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        stack = self._stack()
        text = f"{self._name} hangs: {hangs}, at {place_in(stack)}"
        if self._on_hang is None:
            end_process(EXIT_ENV_HANGS, LastWords("", text, "".join(stack.format())))
        print(text, file=sys.__stderr__, flush=True)
        self._on_hang(DeadlineError(f"{text}. Its stack is on stderr."))
