"""Iterations: their number, the reports of their training steps, and results under RLlib's keys made of these."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlzmq.algorithms.health import HealthWatch, judge
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.metrics import METRICS_STATES, MetricsLogger
from rlzmq.core.names import (
    ALL_MODULES,
    BATCH_SOURCE,
    ENV_RUNNER_RESULTS,
    LEARNER_CONNECTOR,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    REPLAY_BUFFER_RESULTS,
)
from rlzmq.core.plain import without_objects
from rlzmq.core.score_statistics import svg_curve
from rlzmq.core.synonyms import missing_key
from rlzmq.core.timers import LEARNER_STAGES
from rlzmq.driver.session import Session
from rlzmq.driver.update_results import UpdateResult
from rlzmq.runners.episode_metrics import EpisodeMetrics, add_fragment_metas

__all__ = ["IterationResult", "Iterations", "merge_learner_results"]

_log = logging.getLogger("rlzmq.algorithms")

_MAX_CURVE = 10_000  # maximum number of iterations in a result's plot
NUM_LAGS = 20  # number of entries of `policy_lag/num_env_steps`; the last one counts all larger lags, too
_SUMMED = ("num_env_steps_trained", "num_module_steps_trained", "num_env_steps_trained_lifetime")


class IterationResult(dict[str, Any]):
    """An iteration's result. Notebooks show its main numbers and the returns so far.

    Attributes:
        curve: Env steps and mean return of all iterations up to this one.
    """

    curve: tuple[tuple[int, float], ...] = ()

    def __missing__(self, key: str) -> Any:
        raise KeyError(missing_key(key))

    def _repr_html_(self) -> str:
        runners = self["env_runners"]
        rows = {
            "iteration": self["training_iteration"],
            "episode return": f"{runners.get('episode_return_mean', math.nan):.2f}",
            "episodes": runners.get("num_episodes_lifetime", 0),
            "env steps sampled": self[NUM_ENV_STEPS_SAMPLED_LIFETIME],
            "env steps trained": self["num_env_steps_trained_lifetime"],
            "time": f"{self['time_total_s']:.1f} s",
        }
        table = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
        steps, returns = zip(*self.curve, strict=True) if self.curve else ((), ())
        return f"<table>{table}</table>{svg_curve(steps, returns, 'env steps', 'episode return')}"


class Iterations:
    """Counts iterations, collects their reports, and builds the dicts that `train()` returns.

    Args:
        config: The run's config; `config.reporting()` sets the length of an iteration, smoothing and reductions.
        session: Provides the reports.
        metrics: The algorithm's MetricsLogger; values logged by callbacks and runners are added to the result.

    Attributes:
        is_cut_short: Whether `cut_short` was called for the current iteration.
        num_done: Number of completed iterations.
        last_training_s: Duration of the last iteration's training in seconds; None before the first.
        counters: Numbers that callbacks keep under names of their own, as ``algorithm._counters`` in RLlib.
    """

    def __init__(self, config: BaseConfig, session: Session, metrics: MetricsLogger) -> None:
        self._config = config
        self._session = session
        self._metrics = metrics
        self.is_cut_short: bool = False
        self.num_done: int = 0
        self.last_training_s: float | None = None
        self.counters: Counter[str] = Counter()
        self._health = HealthWatch(config)
        self._told: set[str] = set()
        self._held: _Held | None = None
        self.episodes: EpisodeMetrics = EpisodeMetrics(config.metrics_num_episodes_for_smoothing)
        self._learners: dict[str, Any] = {}
        self._replay_buffer: dict[str, Any] = {}
        self._learner_metrics = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
        self._timers: dict[str, list[float]] = {}
        self._steps_by_lag: Counter[int] = Counter()
        self._curve: deque[tuple[int, float]] = deque(maxlen=_MAX_CURVE)
        self._start = time.perf_counter()
        self._run_start = self._start
        self._time_before = 0.0
        self._num_steps_before = 0
        self._num_training_step_calls = 0
        self._weights_version = 0
        self.num_env_steps_trained_lifetime: int = 0
        self._newest: UpdateResult | None = None  # if its learner results were not read yet

    def begin(self) -> None:
        """Begin the next iteration."""
        self._start = time.perf_counter()
        self._timers = {}
        self._steps_by_lag.clear()
        self._num_training_step_calls = 0
        self._num_steps_before = self.num_env_steps_lifetime

    def add_training_step(self, returned: Any, seconds: float) -> None:
        """Record the end of a `training_step`.

        Raises:
            ValueError: It returned something other than None.
        """
        if returned is not None:
            raise ValueError(
                f"training_step() returned a {type(returned).__name__}; expected None: report values through "
                "self.metrics.log_value(…)."
            )
        runners, learners, accounting = (
            self._session.env_runner_group,
            self._session.learner_group,
            self._session.accounting,
        )
        sampled, runners.sampled = runners.sampled, []
        for metas in sampled:
            accounting.add(sampled=sum(int(meta.get("num_env_steps", 0)) for meta in metas))
            self.add_fragments(metas)
        if (num_sampled := self.num_env_steps_lifetime) > accounting.sampled:
            accounting.add(sampled=num_sampled - accounting.sampled)
        trained, learners.trained = learners.trained, []
        for results, num_env_steps in trained:
            # Steps that have been trained before (from a replay buffer) are not counted twice.
            accounting.add(trained=min(num_env_steps, accounting.pending))
            self.add_learner_results(results, num_env_steps)
        self._num_training_step_calls += 1
        self._add_timer("training_step", seconds)

    def _add_timer(self, name: str, seconds: float) -> None:
        """Record a duration; the result has the mean over the iteration."""
        self._timers.setdefault(name, []).append(seconds)

    async def settle(self) -> None:
        """Wait until no update is open, and record the reports of updates that ran ahead of the training steps.

        Called before the learners' state is read or replaced.
        """
        for report in await self._session.settle():
            self.add_update(report)

    def cut_short(self) -> None:
        """End the current iteration after the current update, and its evaluation. A signal handler may call this."""
        self.is_cut_short = True

    def is_complete(self) -> bool:
        """Return whether the minima of `config.reporting()` are met or `cut_short` was called."""
        config = self._config
        min_s, min_sampled = config.min_time_s_per_iteration, config.min_sample_timesteps_per_iteration
        min_trained = config.min_train_timesteps_per_iteration
        return self.is_cut_short or not (
            (min_s and time.perf_counter() - self._start < min_s)
            or (min_sampled and self._num_env_steps_this_iter < min_sampled)
            or (min_trained and self._num_training_step_calls * config.total_train_batch_size < min_trained)
        )

    def end(self) -> bool:
        """End the training of the current iteration; return False if it was cut short."""
        self.num_done += 1
        self.last_training_s = time.perf_counter() - self._start
        return not self.take_cut()

    def take_cut(self) -> bool:
        """Return whether `cut_short` was called since the last call of this method."""
        was_cut, self.is_cut_short = self.is_cut_short, False
        return was_cut

    def add_update(self, report: UpdateResult) -> None:
        """Add the report of one update."""
        self.add_fragments(report.fragments)
        if callable(report.learner_results):
            self.num_env_steps_trained_lifetime += report.num_env_steps_trained
            self._newest = report
        else:
            self.add_learner_results(report.learner_results, report.num_env_steps_trained)
        self._weights_version = report.weights_version
        for lag, num_steps in report.steps_by_lag.items():
            self._steps_by_lag[lag] += num_steps
        names = {"sample": "env_runner_sampling_timer", "learn": "learner_update_timer"}
        for name, seconds in report.timers.items():
            self._timers.setdefault(names.get(name, name), []).append(seconds)

    def add_fragments(self, metas: Iterable[Mapping[str, Any]]) -> None:
        """Add the metadata of fragments from runners."""
        add_fragment_metas(self.episodes, self._metrics if self._held is None else self._held, metas)

    def hold_logged(self) -> None:
        """Buffer values that runners log, instead of writing them to the algorithm's logger, until `release_logged`."""
        self._held = _Held()

    def release_logged(self) -> None:
        """Write the buffered values to the algorithm's MetricsLogger, in order."""
        held, self._held = self._held, None
        for states, key in held.given if held is not None else ():
            self._metrics.aggregate(states, key=key)

    def add_learner_results(self, results: list[dict[str, Any]], num_env_steps: int) -> None:
        """Add the learner results of one update, one dict per rank; [] if a dead rank has lost them."""
        self.num_env_steps_trained_lifetime += num_env_steps
        self._newest = None
        if results:
            self._merge(results, num_env_steps)

    def _merge(self, results: list[dict[str, Any]], num_env_steps: int) -> None:
        merged = merge_learner_results(results, self._learner_metrics)
        overall = merged.setdefault(ALL_MODULES, {})
        overall["num_env_steps_trained"] = num_env_steps
        overall["num_env_steps_trained_lifetime"] = self.num_env_steps_trained_lifetime
        for name in ("learner_thread_in_queue_wait_timer", "learner_thread_update_timer", *LEARNER_STAGES):
            if name in overall:
                self._add_timer(name, overall[name])
        if "connector_pipeline_timer" in (of_connector := overall.get(LEARNER_CONNECTOR, {})):
            self._add_timer("learner_connector_timer", of_connector["connector_pipeline_timer"])
        self._replay_buffer = overall.pop(REPLAY_BUFFER_RESULTS, {})
        self._learners = merged

    @property
    def _num_env_steps_this_iter(self) -> int:
        """Number of env steps sampled since the iteration began."""
        return self.num_env_steps_lifetime - self._num_steps_before

    @property
    def num_env_steps_lifetime(self) -> int:
        """Number of env steps sampled in the run.

        They are reported with fragments, or aggregated by a custom training step from `get_metrics`.
        """
        if not len(self._metrics):
            return self.episodes.num_env_steps_lifetime
        logged = self._metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        return max(self.episodes.num_env_steps_lifetime, int(logged))

    def build_result(self, fault_tolerance: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the iteration that ended."""
        if self._newest is not None and callable(self._newest.learner_results):
            self._merge(self._newest.learner_results(), self._newest.num_env_steps_trained)
            self._newest = None
        elapsed = time.perf_counter() - self._start
        num_new = self._num_env_steps_this_iter
        env_runners = self.episodes.reduce()
        env_runners["num_env_steps_sampled_lifetime_throughput"] = num_new / max(elapsed, 1e-9)
        env_runners["weights_seq_no"] = self._weights_version
        timers = {name: sum(values) / len(values) for name, values in self._timers.items()}
        timers["training_iteration"] = elapsed
        result = IterationResult(
            {
                "training_iteration": self.num_done,
                "num_env_steps_sampled_lifetime": env_runners["num_env_steps_sampled_lifetime"],
                "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
                "num_training_step_calls_per_iteration": self._num_training_step_calls,
                "time_this_iter_s": elapsed,
                "time_total_s": self._time_before + time.perf_counter() - self._run_start,
                "env_runners": env_runners,
                "learners": self._learners,
                "timers": timers,
                "policy_lag": self._lag(),
                "fault_tolerance": dict(fault_tolerance),
                "accounting": self._session.accounting.to_dict(),
            }
        )
        if self._replay_buffer:
            result[REPLAY_BUFFER_RESULTS] = self._replay_buffer
        logged = self._metrics.reduce()
        # Values of users count, e.g. of an overridden `get_metrics`.
        own = logged.get(ENV_RUNNER_RESULTS, {})
        env_runners.update((name, value) for name, value in own.items() if not isinstance(value, Mapping))
        if NUM_ENV_STEPS_SAMPLED_LIFETIME in own:
            # A custom training step has sampled, and logged the runners' metrics.
            env_runners |= own
            result[NUM_ENV_STEPS_SAMPLED_LIFETIME] = env_runners[NUM_ENV_STEPS_SAMPLED_LIFETIME]
        merge_into(result, logged)
        result["bottleneck"] = judge(result).to_dict()
        result["health"] = self._examine(result)
        num_steps = result[NUM_ENV_STEPS_SAMPLED_LIFETIME] or result["num_env_steps_trained_lifetime"]
        self._curve.append((num_steps, env_runners.get("episode_return_mean", math.nan)))
        result.curve = tuple(self._curve)
        return result

    def _lag(self) -> dict[str, Any]:
        """Return the distribution of the lags of the iteration's trained env steps; {} if there are none."""
        steps = self._steps_by_lag
        if not steps:
            return {}
        largest = max(steps)
        counts = [0] * min(largest + 1, NUM_LAGS)
        for lag, num_steps in steps.items():
            counts[min(lag, NUM_LAGS - 1)] += num_steps
        mean = sum(lag * num_steps for lag, num_steps in steps.items()) / steps.total()
        return {"min": min(steps), "mean": mean, "max": largest, "num_env_steps": counts}

    def _examine(self, result: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Return what is wrong; each kind is logged once."""
        found = self._health.examine(result)
        for name in found.keys() - self._told:
            _log.warning("{cause}. {remedy}.".format_map(found[name]))
        self._told |= found.keys()
        return found

    def get_state(self) -> dict[str, Any]:
        """Return the component "algorithm" of a checkpoint: counters, smoothing windows and metrics."""
        results = {
            **self.episodes.get_state(),
            "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
            "time_total_s": self._time_before + time.perf_counter() - self._run_start,
            "weights_version": self._weights_version,
            "learner_metrics": without_objects(self._learner_metrics.get_state()),
        }
        return {
            "iteration": self.num_done,
            "results": results,
            "metrics": without_objects(self._metrics.get_state()),
            "counters": without_objects(dict(self.counters)),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`, or a part of it."""
        self.num_done = state.get("iteration", self.num_done)
        if "results" in state:
            self._set_results(state["results"])
        if "metrics" in state:
            self._metrics.set_state(state["metrics"])
        if "counters" in state:
            self.counters.clear()
            self.counters.update(state["counters"])

    def _set_results(self, state: Mapping[str, Any]) -> None:
        self.episodes.set_state(state)
        self.num_env_steps_trained_lifetime = state["num_env_steps_trained_lifetime"]
        self._time_before = state["time_total_s"]
        self._weights_version = state["weights_version"]
        if "learner_metrics" in state:
            self._learner_metrics.set_state(state["learner_metrics"])


class _Held(MetricsLogger):
    """A MetricsLogger that buffers the arguments of `aggregate` for another logger."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Sequence[Mapping[str, Any]], Any]] = []

    def aggregate(self, states: Sequence[Mapping[str, Any]], *, key: object = None) -> None:
        self.given.append((states, key))


def merge_learner_results(results: list[dict[str, Any]], metrics: MetricsLogger) -> dict[str, Any]:
    """Return the merged results of all ranks, for every module that any rank trained.

    Step counts are summed. Values that learners logged with their `metrics` are merged by their reduction. All others
    are averaged.

    Args:
        results: Results of one update, one dict per rank.
        metrics: Aggregates the values that learners logged. It keeps the lifetime sums, which would otherwise be
            lost with a rank.
    """
    module_ids = dict.fromkeys(module_id for result in results for module_id in result)
    merged = {
        module_id: _merge_values([result[module_id] for result in results if module_id in result])
        for module_id in module_ids
    }
    of_ranks = [result.get(ALL_MODULES, {}) for result in results]
    states = [values[METRICS_STATES] for values in of_ranks if METRICS_STATES in values]
    if states:
        metrics.aggregate(states)
    merged.get(ALL_MODULES, {}).pop(METRICS_STATES, None)
    if BATCH_SOURCE in merged.get(ALL_MODULES, {}):
        sources = [values[BATCH_SOURCE] for values in of_ranks if BATCH_SOURCE in values]
        merged[ALL_MODULES][BATCH_SOURCE] = {
            name: sum(source[name] for source in sources)
            for name in ("num_env_steps", "num_bytes", "num_agent_steps_not_kept")
        }
        if "train_ratio" in sources[0]:  # equal on all ranks
            merged[ALL_MODULES][BATCH_SOURCE]["train_ratio"] = sources[0]["train_ratio"]
    buffers = [values[REPLAY_BUFFER_RESULTS] for values in of_ranks if REPLAY_BUFFER_RESULTS in values]
    if buffers:
        merged[ALL_MODULES][REPLAY_BUFFER_RESULTS] = _of_all_buffers(buffers)
    for module_id, values in metrics.reduce().items():
        own = values if isinstance(values, dict) else {"value": values}
        merged.setdefault(module_id, {}).update(own)
    return merged


def _of_all_buffers(metrics: list[Any]) -> Any:
    """Return the metrics of all ranks' buffers together: sums of counts, means of ``actual_n_step`` (a float)."""
    first = metrics[0]
    if len(metrics) == 1:
        return first
    if not isinstance(first, dict):
        return sum(metrics) / len(metrics) if isinstance(first, float) else sum(metrics)
    names = dict.fromkeys(name for one in metrics for name in one)
    return {name: _of_all_buffers([one[name] for one in metrics if name in one]) for name in names}


def _merge_values(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    if len(of_ranks) == 1:
        return dict(of_ranks[0])
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for values in of_ranks for name in values):
        numbers = [values[name] for values in of_ranks if name in values]
        first = numbers[0]
        if isinstance(first, bool) or not isinstance(first, int | float):
            merged[name] = first
        elif name in _SUMMED:
            merged[name] = sum(numbers)
        elif isinstance(first, int) and len(set(numbers)) == 1:
            merged[name] = first
        else:
            merged[name] = sum(numbers) / len(numbers)
    return merged


def merge_into(target: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Add the entries of `extra` that `target` lacks, at any depth."""
    for name, value in extra.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            merge_into(target[name], value)
        else:
            target.setdefault(name, value)
