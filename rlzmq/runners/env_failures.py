"""Exceptions of environments: the environment is recreated, or the run stops with the steps that reproduce it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import EnvError, ExitRaisedError, StepFailedRecreateEnvError, cut
from rlzmq.core.process import end_if_out_of_memory
from rlzmq.core.tracebacks import is_of_user, place_of, shows_all_frames, user_errors
from rlzmq.envs.registry import resolve_env
from rlzmq.envs.sync_vector import Reproduction
from rlzmq.episodes.bad_values import BadValue
from rlzmq.episodes.step_values import NO_INFO

__all__ = ["EnvFailures", "FailingRunner", "close_env"]

_log = logging.getLogger("rlzmq.runners")
_WINDOW_S = 60.0


class FailingRunner(Protocol):
    """The parts of an `EnvRunner` that failure handling reads."""

    config: BaseConfig
    worker_index: int
    env: Any

    def describe_envs(self) -> str: ...

    def env_seed(self, *coordinates: int) -> int | None: ...


class EnvFailures:
    """Counts the failures of a runner's environments and decides how to handle each.

    Attributes:
        num: Number of failures over the runner's lifetime.
        num_in_a_row: Number of failures since an episode ended normally.
    """

    def __init__(self, runner: FailingRunner) -> None:
        self.num: int = 0
        self.num_in_a_row: int = 0
        self._runner = runner
        self._times: deque[float] = deque()
        self._num_by_place: Counter[tuple[str, str]] = Counter()
        self._last_kind: tuple[type, str] | None = None  # of the last failure, if in an episode's first step

    def recover(self, index: int, where: str, error: Exception) -> int | None:
        """Return the seed for the environment that replaces a failed one; see `count`."""
        self.count(error, index, where, self._runner.env.way_of(index))
        return self._runner.env_seed(index, self.num)

    def count(
        self, error: BaseException, env_index: int | None, where: str, way: Reproduction | None = None
    ) -> None:
        """Count an environment's exception. Return if the environment should be recreated, else raise an error.

        Args:
            error: The environment's exception.
            env_index: Index of the environment; None if unknown.
            where: "step" or "reset".
            way: The reset and the actions that led to it, if known.

        Raises:
            EnvError: ``config.restart_failed_sub_environments`` is off; or there were more consecutive
                failures than ``config.num_consecutive_env_runner_failures_tolerance``, or more in 60 s than
                ``config.env_failures_per_minute_tolerance``. Its cause is ``error``, its ``way_there`` is `way`.
        """
        runner = self._runner
        end_if_out_of_memory(error, f"env runner {runner.worker_index}")
        if isinstance(error, ExitRaisedError):  # from an environment's subprocess; a new one would exit too
            raise error
        self.num += 1
        self.num_in_a_row += 1
        head = self._head(error, env_index, where)
        how = f"{way or 'The steps that led to it are not known.'} {runner.describe_envs()}"
        if expected := _interface_of(error, where):  # a new environment would do the same
            text = f"{head} {expected} Correct {resolve_env(runner.config.env).label}."
        elif reason := self._reason_to_stop(error, way):
            text = f"{head} {reason} {how}"
        else:
            # The environment itself may have asked for it, which is no error.
            if not isinstance(error, StepFailedRecreateEnvError):
                self._log(f"{head} The environment is recreated. {how}", error)
            return
        failure = EnvError(text)
        failure.way_there = way  # type: ignore[attr-defined]
        if not is_of_user(error) and not shows_all_frames():  # only lines of rlzmq
            raise failure from None
        raise failure from error

    def _reason_to_stop(self, error: BaseException, way: Reproduction | None) -> str | None:
        config = self._runner.config
        if not config.restart_failed_sub_environments:
            return (
                "Set config.fault_tolerance(restart_failed_sub_environments=True) to continue with a new one."
            )
        kind, last = (type(error), place_of(error)), self._last_kind
        self._last_kind = kind if way is not None and len(way.actions) <= 1 else None
        if isinstance(error, _MISTAKES) and kind == last == self._last_kind:
            return "A new environment raised the same error at once: correct the environment."
        tolerance = config.num_consecutive_env_runner_failures_tolerance
        if self.num_in_a_row > tolerance:
            return (
                f"It is failure {self.num_in_a_row} in a row without a finished episode, more than "
                f"num_consecutive_env_runner_failures_tolerance={tolerance}."
            )
        if isinstance(error, StepFailedRecreateEnvError):
            return None
        most, now = config.env_failures_per_minute_tolerance, time.perf_counter()
        self._times.append(now)
        while self._times[0] < now - _WINDOW_S:
            self._times.popleft()
        if most is not None and len(self._times) > most:
            return (
                f"These are {len(self._times)} failures within {_WINDOW_S:.0f} s, more than "
                f"env_failures_per_minute_tolerance={most}: correct the environment, or raise the tolerance "
                "(None: any number)."
            )
        return None

    def way_to(self, batch: Any, value: BadValue) -> Reproduction | None:
        """Return the steps that led an environment to a value in the last sampled batch, if known.

        Args:
            batch: All chunks of the sample; those of one environment in chronological order.
            value: The value.
        """
        env = self._runner.env
        way: Reproduction | None = env.way_of(value.env_index) if hasattr(env, "way_of") else None
        if way is None:
            return None
        own = np.flatnonzero(batch.env_index == value.env_index)
        later = own[own > value.episode]
        is_over = batch.terminated[own[-1]] or batch.truncated[own[-1]]
        was_reset = int(is_over and not env.needs_reset[value.env_index])
        num_left = int(batch.t_started[value.episode] + batch.length[value.episode]) - value.num_env_steps
        # The reset between two episodes takes a step.
        return way.before(num_left + int(batch.length[later].sum()) + len(later) + was_reset)

    def _log(self, text: str, error: BaseException) -> None:
        """Log the first failure of each kind with its traceback, then only the 10th, 100th, … one."""
        place = place_of(error)
        kind = (type(error).__name__, place)
        self._num_by_place[kind] = num = self._num_by_place[kind] + 1
        shown = error if shows_all_frames() else None
        if num == 1:
            _log.warning("%s", text, exc_info=shown)
        elif math.log10(num).is_integer():
            who = f"Environments of env runner {self._runner.worker_index} have"
            _log.warning("%s raised %s at %s %d times.", who, *kind, num, exc_info=shown)

    def _head(self, error: BaseException, env_index: int | None, where: str) -> str:
        """Return who raised what, and where in the user's code."""
        which = "An environment" if env_index is None else f"Environment {env_index}"
        try:
            said = cut(str(error))
        except Exception:  # the user's __str__ raises too
            said = "(the original error cannot be rendered)"
        place = f" ({place_of(error)})" if is_of_user(error) else ""
        return (
            f"{which} of env runner {self._runner.worker_index} raised {type(error).__name__} in {where}()"
            f"{said and ': '}{said.rstrip('.')}{place}."
        )


# Errors of code that is wrong, not of a simulator or a connection that may work in the next try.
_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, FileNotFoundError, ImportError, LookupError, NameError,
    NotImplementedError, PermissionError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_RESETS = "Expected def reset(self, *, seed=None, options=None), which returns (observation, info)."
_STEPS = "Expected that step(action) returns (observation, reward, terminated, truncated, info)."


def _interface_of(error: BaseException, where: str) -> str | None:
    """Return what an environment's method must take and return; None if the error has another cause."""
    if type(error) not in (TypeError, ValueError):
        return None
    text = str(error)
    if text.startswith(NO_INFO):
        return _RESETS if where == "reset" else _STEPS
    if "unpack" in text:
        if where == "step" and ("(expected 5" in text or "non-iterable" in text):
            return _STEPS
        if where == "reset" and ("(expected 2" in text or "non-iterable" in text):
            return _RESETS
    takes_less = "reset() got an unexpected keyword argument" in text
    if isinstance(error, TypeError) and where == "reset" and takes_less:
        return _RESETS
    return None


def close_env(env: Any, worker_index: int) -> None:
    """Close a vector env and all its parts. Exceptions are logged and do not keep the other parts from closing."""
    try:
        with user_errors():
            env.close()
    except Exception:
        _log.warning("An environment of env runner %d raised in close().", worker_index, exc_info=True)
        parts: Sequence[Any] = getattr(env, "envs", ())
        for part in parts:
            try:
                with user_errors():
                    part.close()
            except Exception:
                _log.debug("Another one raised in close().", exc_info=True)
