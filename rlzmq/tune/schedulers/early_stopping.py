"""Schedulers that end bad trials early: successive halving, Hyperband, and the median stopping rule.

ASHA: Li et al. 2018, arXiv:1810.05934.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.telemetry.metric_paths import Mode
from rlzmq.tune.callback import SearchTrial
from rlzmq.tune.schedulers.base import CONTINUE, PAUSE, STOP, Decision, TrialScheduler

__all__ = ["ASHAScheduler", "AsyncHyperBandScheduler", "HyperBandScheduler", "MedianStoppingRule"]


@dataclasses.dataclass
class ASHAScheduler(TrialScheduler):
    """Ends trials that are not among the best when they reach a rung.

    Rungs are at the times ``grace_period * reduction_factor**k`` below `max_t`. At a rung a trial ends if its score is
    below the ``1 - 1/reduction_factor`` quantile of the scores that earlier trials had there. The first trial
    continues.

    Args:
        time_attr: Path of the time in results.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
        max_t: Time at which every trial ends.
        grace_period: Time before which no trial ends.
        reduction_factor: About one in `reduction_factor` trials passes a rung.
        brackets: Number of brackets; trials take turns in using them. The rungs of bracket s begin at
            ``grace_period * reduction_factor**s``.
        stop_last_trials: Whether trials end at `max_t`.
    """

    time_attr: str = "training_iteration"
    metric: str | None = None
    mode: Mode | None = None
    max_t: float = 100
    grace_period: float = 1
    reduction_factor: float = 4
    brackets: int = 1
    stop_last_trials: bool = True
    ends_trials: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.grace_period <= self.max_t:
            raise ConfigurationError(
                f"ASHAScheduler(grace_period={self.grace_period}, max_t={self.max_t}): expected a grace_period above 0 "
                "and at most max_t."
            )
        if not self.reduction_factor > 1 or self.brackets < 1:
            raise ConfigurationError(
                f"ASHAScheduler(reduction_factor={self.reduction_factor}, brackets={self.brackets}): expected a "
                "reduction_factor above 1 and at least 1 bracket."
            )
        self._rungs = [self._new_rungs(bracket) for bracket in range(self.brackets)]

    def _new_rungs(self, bracket: int) -> list[tuple[float, dict[str, float]]]:
        """Return (time, scores by trial) of a bracket's rungs, last rung first."""
        rungs: list[tuple[float, dict[str, float]]] = []
        time = self.grace_period * self.reduction_factor**bracket
        while time < self.max_t:
            rungs.insert(0, (time, {}))
            time *= self.reduction_factor
        return rungs

    def observe(self, trial_id: str, time: float, score: float) -> None:
        """Record a result at the last rung that the trial has reached."""
        self._enter(trial_id, time, score)

    def on_trial_result(self, trial: SearchTrial, result: Mapping[str, Any]) -> Decision:
        """Return STOP at `max_t`, or if the trial's score at a rung is not among the best."""
        time, score = self.time_of(result), self.score_of(result)
        if time is None or score is None:
            return CONTINUE
        passes = self._enter(trial.trial_id, time, score)
        return STOP if not passes or (self.stop_last_trials and time >= self.max_t) else CONTINUE

    def _enter(self, trial_id: str, time: float, score: float) -> bool:
        rungs = self._rungs[int(trial_id) % self.brackets]
        for milestone, scores in rungs:
            if time < milestone:
                continue
            if trial_id in scores:
                return True
            others = list(scores.values())
            scores[trial_id] = score
            return not others or score >= float(np.percentile(others, (1 - 1 / self.reduction_factor) * 100))
        return True


AsyncHyperBandScheduler = ASHAScheduler


@dataclasses.dataclass
class HyperBandScheduler(ASHAScheduler):
    """ASHA with all of Hyperband's brackets that fit below `max_t` (arXiv:1603.06560).

    Unlike Ray's class of this name, no trial waits for others at a rung: it is compared with those that came there
    before it.

    Args:
        time_attr: Path of the time in results.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
        max_t: Time at which every trial ends.
        reduction_factor: About one in `reduction_factor` trials passes a rung.
        stop_last_trials: Whether trials end at `max_t`.
    """

    time_attr: str = "time_total_s"
    max_t: float = 81
    reduction_factor: float = 3
    grace_period: float = dataclasses.field(default=1, init=False)
    brackets: int = dataclasses.field(default=1, init=False)

    def __post_init__(self) -> None:
        """Check the settings; the number of brackets follows from them."""
        if self.reduction_factor > 1:
            while self.grace_period * self.reduction_factor**self.brackets < self.max_t:
                self.brackets += 1
        super().__post_init__()


@dataclasses.dataclass
class MedianStoppingRule(TrialScheduler):
    """Ends a trial whose best score is below the median of the others' mean scores up to the same time.

    Source: Golovin et al. 2017, "Google Vizier", section 3.2.1.

    Args:
        time_attr: Path of the time in results.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
        grace_period: Time before which no trial ends; earlier results do not count.
        min_samples_required: How many other trials must have reached the time.
        hard_stop: Whether such trials end; otherwise they pause until the others have ended.
    """

    time_attr: str = "time_total_s"
    metric: str | None = None
    mode: Mode | None = None
    grace_period: float = 60.0
    min_samples_required: int = 3
    hard_stop: bool = True

    def __post_init__(self) -> None:
        self._results: dict[str, list[tuple[float, float]]] = {}
        self._paused: set[str] = set()

    def observe(self, trial_id: str, time: float, score: float) -> None:
        """Record a result."""
        self._results.setdefault(trial_id, []).append((time, score))

    def on_trial_result(self, trial: SearchTrial, result: Mapping[str, Any]) -> Decision:
        """Return STOP (PAUSE without `hard_stop`) for a trial that is worse than the median."""
        time, score = self.time_of(result), self.score_of(result)
        if time is None or score is None:
            return CONTINUE
        self.observe(trial.trial_id, time, score)
        if time < self.grace_period or trial.trial_id in self._paused:
            return CONTINUE
        means = [
            statistics.fmean(scores)
            for other, results in self._results.items()
            if other != trial.trial_id and max(t for t, _ in results) >= time
            if (scores := [s for t, s in results if self.grace_period <= t <= time])
        ]
        if len(means) < self.min_samples_required:
            return CONTINUE
        best = max(s for _, s in self._results[trial.trial_id])
        if best >= statistics.median(means):
            return CONTINUE
        if self.hard_stop:
            return STOP
        self._paused.add(trial.trial_id)
        return PAUSE
