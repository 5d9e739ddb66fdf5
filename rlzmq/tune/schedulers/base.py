"""TrialScheduler: decides, from trials' results, which trials continue, pause, end, or copy another's checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from rlzmq.core.errors import ConfigurationError
from rlzmq.telemetry.metric_paths import Mode, check_mode, number_at
from rlzmq.tune.callback import SearchTrial

__all__ = ["CONTINUE", "PAUSE", "STOP", "Decision", "FIFOScheduler", "TrialScheduler"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a trial does next.

    Attributes:
        action: "continue", "pause" (its state is saved, and others run first) or "stop".
        saves: Whether its state is saved now.
        exploits: The trial whose newest checkpoint it continues from; None: it keeps its own state.
        changes: New values of its config by path; only with `exploits`.
    """

    action: Literal["continue", "pause", "stop"] = "continue"
    saves: bool = False
    exploits: SearchTrial | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


CONTINUE = Decision()
PAUSE = Decision("pause", saves=True)
STOP = Decision("stop")


class TrialScheduler:
    """Base class of the schedulers.

    Results of resumed trials, and of trials on other machines, are passed to `observe`. New results of this process's
    trials are passed to `on_trial_result`.

    Attributes:
        time_attr: Path of the time in results, e.g. "training_iteration".
        metric: Path of the metric; None: that of TuneConfig.
        mode: Whether the metric should be large ("max") or small ("min"); None: that of TuneConfig.
        starts_all: Whether all trials are started, in turns, before any is far ahead.
        ends_trials: Whether the scheduler ends every trial by its own rule.
    """

    time_attr: str = "training_iteration"
    metric: str | None = None
    mode: Mode | None = None
    starts_all: ClassVar[bool] = False
    ends_trials: ClassVar[bool] = False

    def set_search_properties(self, metric: str | None, mode: Mode | None) -> None:
        """Use the metric and mode of TuneConfig.

        Raises:
            ConfigurationError: Both TuneConfig and the scheduler set one of them, or neither does, or a mode is
                unknown.
        """
        name = type(self).__name__
        check_mode(self.mode, name)
        for own, given, setting in ((self.metric, metric, "metric"), (self.mode, mode, "mode")):
            if own is not None and given is not None and own != given:
                raise ConfigurationError(
                    f"{setting} is {given!r} in TuneConfig and {own!r} in {name}: set it in one of them only."
                )
        self.metric, self.mode = self.metric or metric, self.mode or mode
        if self.metric is None or self.mode is None:
            raise ConfigurationError(
                f"{name} compares trials: set TuneConfig(metric=…, mode='max' or 'min')."
            )

    def on_trial_add(self, trial: SearchTrial) -> None:
        """Register a new or resumed trial."""

    def observe(self, trial_id: str, time: float, score: float) -> None:
        """Record a result without a decision about its trial.

        Args:
            trial_id: The trial.
            time: The result's value of `time_attr`.
            score: The metric; negated if `mode` is "min", so that large scores are good.
        """

    def on_trial_result(self, trial: SearchTrial, result: Mapping[str, Any]) -> Decision:
        """Return the decision about a trial after this result."""
        return CONTINUE

    def on_trial_end(self, trial: SearchTrial) -> None:
        """Record that a trial has ended."""

    def choose(self, waiting: Sequence[SearchTrial]) -> SearchTrial:
        """Return the trial to run next."""
        return waiting[0]

    def time_of(self, result: Mapping[str, Any]) -> float | None:
        """Return the time of a result; None if the result lacks it."""
        return number_at(result, self.time_attr)

    def score_of(self, result: Mapping[str, Any]) -> float | None:
        """Return the metric of a result, negated if small values are good; None if the result lacks it."""
        value = None if self.metric is None else number_at(result, self.metric)
        return -value if value is not None and self.mode == "min" else value


@dataclasses.dataclass
class FIFOScheduler(TrialScheduler):
    """Lets every trial run until its stop criterion."""

    def set_search_properties(self, metric: str | None, mode: Mode | None) -> None:
        """Use the metric and mode of TuneConfig; both may be missing."""
        check_mode(mode, "TuneConfig")
        self.metric: str | None = metric
        self.mode: Mode | None = mode
