"""Rules that end trials: stop dicts, functions and Stopper classes."""

from __future__ import annotations

import datetime
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.signatures import check_takes
from rlzmq.core.synonyms import did_you_mean
from rlzmq.telemetry.runs import Mode, flatten, number_at, value_at

__all__ = [
    "CombinedStopper",
    "ExperimentPlateauStopper",
    "FunctionStopper",
    "MaximumIterationStopper",
    "NoopStopper",
    "Stopper",
    "ThresholdStopper",
    "TimeoutStopper",
    "TrialPlateauStopper",
    "make_stopper",
    "missing_metrics",
]

_log = logging.getLogger("rlzmq.tune")


class Stopper:
    """Base class of the rules that end trials."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the trial ends after this result."""
        raise NotImplementedError

    def stop_all(self) -> bool:
        """Return whether all trials end now."""
        return False


class NoopStopper(Stopper):
    """Never ends a trial."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False."""
        return False


@dataclass
class ThresholdStopper(Stopper):
    """Ends a trial when one of the metrics reaches its threshold.

    Args:
        thresholds: Path in the result -> value; may be nested. A trial ends when the metric is at least the value.
    """

    thresholds: dict[str, float]
    _is_checked: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.thresholds = flatten(self.thresholds)
        for path, value in self.thresholds.items():
            if not isinstance(value, bool | int | float) or math.isnan(value):
                raise ConfigurationError(f"RunConfig(stop={{{path!r}: {value!r}}}): expected a number.")

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether one of the metrics has reached its threshold.

        Raises:
            ConfigurationError: Results have none of the metrics, so no trial would ever end.
        """
        if not self._is_checked:
            missing, text = missing_metrics("RunConfig(stop=…)", self.thresholds, result)
            if missing and len(missing) == len(self.thresholds):
                raise ConfigurationError(text)
            self._is_checked = parts_to_come(result) == ("evaluation/",)
            if missing and self._is_checked:
                _log.warning("%s", text)
        return any(
            (value := number_at(result, path)) is not None and value >= threshold
            for path, threshold in self.thresholds.items()
        )


@dataclass
class FunctionStopper(Stopper):
    """Ends a trial when a function returns True.

    Args:
        function: ``(trial_id, result) -> bool``.
    """

    function: Callable[[str, dict[str, Any]], bool]

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return the function's result."""
        return bool(self.function(trial_id, result))


class MaximumIterationStopper(ThresholdStopper):
    """Ends a trial after a number of iterations."""

    def __init__(self, max_iter: int) -> None:
        super().__init__({"training_iteration": max_iter})


@dataclass
class TimeoutStopper(Stopper):
    """Ends all trials after a period of time.

    Args:
        timeout: Seconds, or a timedelta, counted from the first result.
    """

    timeout: float | datetime.timedelta
    _end: float | None = field(default=None, init=False, repr=False)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False: all trials end together."""
        if self._end is None:
            seconds = self.timeout
            seconds = seconds.total_seconds() if isinstance(seconds, datetime.timedelta) else seconds
            self._end = time.monotonic() + seconds
        return False

    def stop_all(self) -> bool:
        """Return whether the time has run out."""
        return self._end is not None and time.monotonic() >= self._end


@dataclass
class CombinedStopper(Stopper):
    """Ends a trial when one of several stoppers does."""

    stoppers: tuple[Stopper, ...]

    def __init__(self, *stoppers: Stopper) -> None:
        self.stoppers = stoppers

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether one of the stoppers ends the trial. All of them receive the result."""
        ends = [stopper(trial_id, result) for stopper in self.stoppers]
        return any(ends)

    def stop_all(self) -> bool:
        """Return whether one of the stoppers ends all trials."""
        return any(stopper.stop_all() for stopper in self.stoppers)


@dataclass
class TrialPlateauStopper(Stopper):
    """Ends a trial whose metric no longer changes.

    Args:
        metric: Path of the metric.
        std: The trial ends when the standard deviation of the newest results is below this.
        num_results: How many results count.
        grace_period: Iterations before a trial may end.
        metric_threshold: A trial ends only if its metric is on the good side of this value; see `mode`. None: at any
            value.
        mode: "min": trials whose metric is above the threshold continue; "max": those below it.
    """

    metric: str
    std: float = 0.01
    num_results: int = 4
    grace_period: int = 4
    metric_threshold: float | None = None
    mode: Mode | None = None
    _values: dict[str, deque[float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.metric_threshold is not None and self.mode not in ("min", "max"):
            raise ConfigurationError("TrialPlateauStopper(metric_threshold=…) needs mode='min' or 'max'.")

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the newest values of the trial's metric are nearly the same."""
        value = number_at(result, self.metric)
        if value is None:
            return False
        values = self._values.setdefault(trial_id, deque(maxlen=self.num_results))
        values.append(value)
        if result["training_iteration"] < self.grace_period or len(values) < self.num_results:
            return False
        sign = -1 if self.mode == "min" else 1
        if self.metric_threshold is not None and sign * value < sign * self.metric_threshold:
            return False
        return statistics.pstdev(values) < self.std


@dataclass
class ExperimentPlateauStopper(Stopper):
    """Ends all trials when the best values no longer change.

    Args:
        metric: Path of the metric.
        std: All trials end when the standard deviation of the best values is at most this.
        top: How many of the best values count.
        mode: Whether small ("min") or large ("max") values are good.
        patience: How many results in a row must meet the condition.
    """

    metric: str
    std: float = 0.001
    top: int = 10
    mode: Mode = "min"
    patience: int = 0
    _best: list[float] = field(default_factory=list, init=False, repr=False)
    _num_met: int = field(default=0, init=False, repr=False)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether all trials end."""
        value = number_at(result, self.metric)
        if value is not None:
            self._best = sorted([*self._best, value], reverse=self.mode == "max")[: self.top]
            is_met = len(self._best) == self.top and statistics.pstdev(self._best) <= self.std
            self._num_met = self._num_met + 1 if is_met else 0
        return self.stop_all()

    def stop_all(self) -> bool:
        """Return whether the best values have stayed nearly the same."""
        return self._num_met > self.patience


def parts_to_come(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return beginnings of paths that later results may have: of evaluations, ended episodes, and first updates."""
    parts = ["evaluation/"]
    if value_at(result, "env_runners/num_episodes_lifetime") == 0:
        parts.append("env_runners/")
    if value_at(result, "num_env_steps_trained_lifetime") == 0:  # e.g. while a replay buffer is filled
        parts.append("learners/")
    return tuple(parts)


def missing_metrics(where: str, paths: Iterable[str], result: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return which metrics a result lacks, except those that may appear later, and a text about it."""
    later, numbers = parts_to_come(result), bool | int | float
    missing = [
        path
        for path in paths
        if not isinstance(value_at(result, path), numbers) and not path.startswith(later)
    ]
    known = [path for path, value in flatten(result).items() if isinstance(value, numbers)]
    return missing, "".join(
        f"{where}: results have no {path!r}.{did_you_mean(path, known)}" for path in missing[:1]
    )


def make_stopper(stop: object) -> Stopper:
    """Return the stopper for a value of `RunConfig(stop=…)`.

    Raises:
        ConfigurationError: The value is not a dict, a function, a Stopper or None.
    """
    if stop is None:
        return NoopStopper()
    if isinstance(stop, Stopper):
        return stop
    if isinstance(stop, Mapping):
        return ThresholdStopper(dict(stop))
    if callable(stop):
        check_takes(stop, "RunConfig(stop=…)", "trial_id", "result")
        return FunctionStopper(stop)
    raise ConfigurationError(
        f"RunConfig(stop={stop!r}): expected a dict such as {{'training_iteration': 10}}, a function or a Stopper."
    )
