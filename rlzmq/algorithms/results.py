"""Results under RLlib's keys, out of what updates and evaluation rounds report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rlzmq.core.metrics import MetricsLogger
from rlzmq.runners.episode_metrics import EpisodeMetrics
from rlzmq.runtime.reports import Accounting, UpdateReport

__all__ = ["ResultBuilder", "merge_learner_results"]

_SUMMED = ("num_env_steps_trained", "num_module_steps_trained", "num_env_steps_trained_lifetime")
_ALL_MODULES = "__all_modules__"


class ResultBuilder:
    """Collects one iteration's reports and makes the dict that `train()` returns.

    Args:
        config: For smoothing windows.
        metrics: The algorithm's MetricsLogger: what callbacks and runners log joins the result.
    """

    def __init__(self, config: Any, metrics: MetricsLogger) -> None:
        self._metrics = metrics
        self.episodes = EpisodeMetrics(config.metrics_num_episodes_for_smoothing)
        self._learners: dict[str, Any] = {}
        self._timers: dict[str, list[float]] = {}
        self._start = time.perf_counter()
        self._run_start = self._start
        self._time_before = 0.0
        self._num_steps_before = 0
        self._num_training_step_calls = 0
        self._weights_version = 0
        self.num_env_steps_trained_lifetime = 0
        self._num_module_steps_trained_lifetime: dict[str, int] = {}

    def begin_iteration(self) -> None:
        """A new iteration starts now."""
        self._start = time.perf_counter()
        self._timers = {}
        self._num_training_step_calls = 0
        self._num_steps_before = self.episodes.num_env_steps_lifetime

    def add_training_step(self, seconds: float) -> None:
        """One `training_step()` took so long."""
        self._num_training_step_calls += 1
        self.add_timer("training_step", seconds)

    def add_timer(self, name: str, seconds: float) -> None:
        """Log a timer; the result has the mean over the iteration."""
        self._timers.setdefault(name, []).append(seconds)

    def add_update(self, report: UpdateReport) -> None:
        """Take in one update's report."""
        self.add_fragments(report.fragments)
        self.add_learner_results(report.learner_results, report.num_env_steps_trained)
        self._weights_version = report.weights_version
        names = {"sample": "env_runner_sampling_timer", "learn": "learner_update_timer"}
        for name, seconds in report.timers.items():
            self.add_timer(names.get(name, name), seconds)

    def add_fragments(self, metas: Iterable[Mapping[str, Any]]) -> None:
        """Take in what runners reported with their fragments."""
        add_fragment_metas(self.episodes, self._metrics, metas)

    def add_learner_results(self, results: list[dict[str, Any]], num_env_steps: int) -> None:
        """Take in one update's learner results, one dict per rank."""
        if not results:
            return
        merged = merge_learner_results(results)
        self.num_env_steps_trained_lifetime += num_env_steps
        for module_id, values in merged.items():
            steps = values.get("num_module_steps_trained")
            if steps is not None:
                total = self._num_module_steps_trained_lifetime.get(module_id, 0) + int(steps)
                self._num_module_steps_trained_lifetime[module_id] = total
                values["num_module_steps_trained_lifetime"] = total
        overall = merged.setdefault(_ALL_MODULES, {})
        overall["num_env_steps_trained"] = num_env_steps
        overall["num_env_steps_trained_lifetime"] = self.num_env_steps_trained_lifetime
        self._learners = merged

    @property
    def time_this_iter_s(self) -> float:
        """Seconds since the iteration began."""
        return time.perf_counter() - self._start

    @property
    def num_env_steps_this_iter(self) -> int:
        """Env steps sampled since the iteration began."""
        return self.episodes.num_env_steps_lifetime - self._num_steps_before

    @property
    def num_training_step_calls(self) -> int:
        """Training steps since the iteration began."""
        return self._num_training_step_calls

    def build(
        self, iteration: int, accounting: Accounting, fault_tolerance: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The result of the iteration that ends now."""
        elapsed = self.time_this_iter_s
        num_new = self.num_env_steps_this_iter
        env_runners = self.episodes.reduce()
        env_runners["num_env_steps_sampled_lifetime_throughput"] = num_new / max(elapsed, 1e-9)
        env_runners["weights_seq_no"] = self._weights_version
        timers = {name: sum(values) / len(values) for name, values in self._timers.items()}
        timers["training_iteration"] = elapsed
        result: dict[str, Any] = {
            "training_iteration": iteration,
            "num_env_steps_sampled_lifetime": env_runners["num_env_steps_sampled_lifetime"],
            "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
            "num_training_step_calls_per_iteration": self._num_training_step_calls,
            "time_this_iter_s": elapsed,
            "time_total_s": self._time_before + time.perf_counter() - self._run_start,
            "env_runners": env_runners,
            "learners": self._learners,
            "timers": timers,
            "fault_tolerance": dict(fault_tolerance),
            "accounting": accounting.to_dict(),
        }
        _merge_into(result, self._metrics.reduce())
        return result

    def get_state(self) -> dict[str, Any]:
        """Counters and windows, for a checkpoint."""
        return {
            **self.episodes.get_state(),
            "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
            "num_module_steps_trained_lifetime": dict(self._num_module_steps_trained_lifetime),
            "time_total_s": self._time_before + time.perf_counter() - self._run_start,
            "weights_version": self._weights_version,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's counters."""
        self.episodes.set_state(state)
        self.num_env_steps_trained_lifetime = state["num_env_steps_trained_lifetime"]
        self._num_module_steps_trained_lifetime = dict(state["num_module_steps_trained_lifetime"])
        self._time_before = state["time_total_s"]
        self._weights_version = state["weights_version"]


def add_fragment_metas(
    episodes: EpisodeMetrics, metrics: MetricsLogger | None, metas: Iterable[Mapping[str, Any]]
) -> None:
    """Take fragments' metas into episode metrics, and what callbacks logged into `metrics`."""
    for meta in metas:
        num_steps = int(meta.get("num_env_steps", 0))
        default_agent = {"default_agent": num_steps}
        episodes.add_steps(
            num_steps,
            meta.get("agent_steps", default_agent),
            meta.get("module_steps", {"default_policy": num_steps}),
        )
        episodes.timers.merge(meta.get("timers") or {})
        finished = meta.get("episode_metrics") or {}
        if finished.get("returns"):
            episodes.add_episodes(finished["returns"], finished["lengths"], finished["durations_s"])
        if finished.get("agent_returns") or finished.get("module_returns"):
            episodes.add_split_returns(finished.get("agent_returns", {}), finished.get("module_returns", {}))
        if metrics is not None and meta.get("custom_metrics"):
            metrics.aggregate([meta["custom_metrics"]], key="env_runners")


def merge_learner_results(results: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' results as one: counts of steps are added up, everything else is averaged."""
    if len(results) == 1:
        return {module_id: dict(values) for module_id, values in results[0].items()}
    merged: dict[str, Any] = {}
    for module_id in results[0]:
        of_ranks = [result[module_id] for result in results if module_id in result]
        values: dict[str, Any] = {}
        for name, first in of_ranks[0].items():
            numbers = [rank[name] for rank in of_ranks if name in rank]
            if isinstance(first, bool) or not isinstance(first, int | float):
                values[name] = first
            elif name in _SUMMED:
                values[name] = sum(numbers)
            elif isinstance(first, int):
                values[name] = first if len(set(numbers)) == 1 else sum(numbers) / len(numbers)
            else:
                values[name] = sum(numbers) / len(numbers)
        merged[module_id] = values
    return merged


def _merge_into(target: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            _merge_into(target[name], value)
        else:
            target.setdefault(name, value)
