"""Watchdog that ends a runner's process when its environments hang in a constructor, a reset or a step.

    sampler thread                           watching thread, ten times per second
    work() … reset, step, step … ──────────► time since the last of them returned ──► stacks, exit
                                             (longer than the limit of what is under way)

It works without the broker, which may be restarting, and the driver, which may be training.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import DeadlineError
from rlzmq.core.last_words import LastWords, end_process
from rlzmq.core.tracebacks import place_in
from rlzmq.protocol.progress_deadlines import ProgressWatch

__all__ = ["EXIT_ENV_HANGS", "EnvWatch"]

_log = logging.getLogger("rlzmq.runners")

EXIT_ENV_HANGS = 72
"""Exit code of a runner's process whose environments hang."""

_LOOK_S = 0.1
# If a check is later than this, the process was frozen, or a step held the GIL.
_LATE_S = 1.0
_HINT_AFTER_S = 30.0


class EnvWatch:
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
        self._name = name
        self._on_hang = on_hang
        self._step_timeout_s = float(config.env_step_timeout_s or 0.0)
        self._reset_timeout_s = float(config.env_reset_timeout_s or 0.0)
        self._pace = ProgressWatch(self._step_timeout_s)
        self._env: Any = None
        # Written by the sampler's thread, read by the watching one.
        self._depth = 0
        self._thread_id = 0
        self._returned_at = 0.0
        self._num_returned = 0
        self._num_steps = 0
        self._is_resetting = False
        self._begins_episodes = False
        # Used by the watching thread only.
        self._seen = 0
        self._had_reset = True
        self._has_hinted = False
        self._looked_at = self._forgiven_at = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name=f"{name} env watch", daemon=True).start()

    @property
    def progress(self) -> int:
        """A counter of vector steps and of resets of all environments."""
        return self._num_returned

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    # -- the sampler's thread -------------------------------------------------------------------

    @contextlib.contextmanager
    def work(self, *, is_reset: bool = False) -> Iterator[None]:
        """Return a context in which the limits apply.

        Args:
            is_reset: The whole block has the limit of a reset.
        """
        was_resetting = self._is_resetting
        self._is_resetting = is_reset
        self._returned_at = time.monotonic()
        self._thread_id = threading.get_ident()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._is_resetting = was_resetting
            self._returned_at = time.monotonic()

    def attend(self, env: Any) -> None:
        """Watch each reset and step of this vector env from now on; once per env."""
        if env is self._env:
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
        clock = time.monotonic

        def step(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._returned_at = clock()
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

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            if now - self._looked_at > _LATE_S:
                self._forgiven_at = now
            self._looked_at = now
            hangs = self._look(now)
            if hangs and not self._over.is_set():
                self._end(hangs)
                return

    def _look(self, now: float) -> str:
        """Return a description of what hangs; "" if nothing does."""
        if not self._depth:
            self._pace.idle(now)
            return ""
        is_reset = self._is_reset_now()
        returned_at, num_returned = max(self._returned_at, self._forgiven_at), self._num_returned
        if num_returned != self._seen:
            if self._had_reset:
                self._pace.idle(returned_at)  # the duration of a reset must not count as a step's
            self._pace.stamp(num_returned, returned_at)
            self._seen, self._had_reset = num_returned, is_reset
        self._had_reset |= is_reset
        limit_s, why = self._limit(is_reset)
        # Check again: it may have returned while this thread was not running.
        silent_s = now - max(self._returned_at, self._forgiven_at)
        if silent_s >= limit_s and self._num_returned == num_returned:
            return f"{self._under_way(is_reset)} has not returned for {silent_s:.1f} s ({why})"
        if silent_s >= _HINT_AFTER_S and not self._has_hinted:
            self._has_hinted = True
            _log.warning(
                "%s: %s takes %.0f s so far; it counts as hanging after %.0f s (%s).",
                self._name, self._under_way(is_reset), silent_s, limit_s, why,
            )  # fmt: skip
        return ""

    def _is_reset_now(self) -> bool:
        env = self._env
        inner: Any = getattr(getattr(env, "unwrapped", env), "is_resetting", False)
        return self._is_resetting or self._begins_episodes or inner is True

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
            return "making or resetting its environments"
        return "a vector step" if self._num_steps else "its first vector step"

    def _end(self, hangs: str) -> None:
        sys.stdout.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        frame = sys._current_frames().get(self._thread_id)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        text = f"{self._name} hangs: {hangs}, at {place_in(stack)}"
        if self._on_hang is None:
            end_process(EXIT_ENV_HANGS, LastWords("", text, "".join(stack.format())))
        print(text, file=sys.__stderr__, flush=True)
        self._on_hang(DeadlineError(f"{text}. Its stack is on stderr."))
