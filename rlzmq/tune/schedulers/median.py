"""MedianStoppingRule: ends trials that are worse than the median of the others."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from rlzmq.telemetry.metric_paths import Mode
from rlzmq.tune.schedulers.base import CONTINUE, PAUSE, STOP, Decision, ScheduledTrial, TrialScheduler

__all__ = ["MedianStoppingRule"]


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

    def on_trial_result(self, trial: ScheduledTrial, result: Mapping[str, Any]) -> Decision:
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
