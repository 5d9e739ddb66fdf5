"""Iterations: their number, the reports of their training steps, and results under RLlib's keys made of these."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlzmq.algorithms.health import HealthWatch, judge
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpoint import without_objects
from rlzmq.core.metrics import LEARNER_STAGES, MetricsLogger, ReducedMetrics, StageTimers, StatsBase
from rlzmq.core.names import (
    ALL_MODULES,
    BATCH_SOURCE,
    ENV_RUNNER_RESULTS,
    LEARNER_CONNECTOR,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    REPLAY_BUFFER_RESULTS,
)
from rlzmq.core.score_statistics import svg_curve
from rlzmq.core.synonyms import missing_key
from rlzmq.driver.session import Session
from rlzmq.driver.updates import UpdateResult
from rlzmq.runners.episode_metrics import EpisodeMetrics, add_fragment_metas

__all__ = ["IterationResult", "Iterations", "LearnerResults"]

_log = logging.getLogger("rlzmq.algorithms")

_MAX_CURVE = 10_000  # maximum number of iterations in a result's plot
NUM_LAGS = 20  # number of entries of `policy_lag/num_env_steps`; the last one counts all larger lags, too
_TIMERS = ("learner_thread_in_queue_wait_timer", "learner_thread_update_timer", *LEARNER_STAGES)


class IterationResult(dict[str, Any]):
    """An iteration's result. Notebooks show its main numbers and the returns so far.

    Attributes:
        curve: Env steps and mean return of all iterations up to this one.
    """

    curve: tuple[tuple[int, float], ...] = ()

    def __missing__(self, key: str) -> object:
        below = (f"env_runners/{name}" for name in self.get("env_runners", ()))
        raise KeyError(missing_key(key, [*self, *below]))

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

    Runners and learners log into a MetricsLogger each. The states of their values travel with fragments and updates,
    and a result has what these become when they are merged.

    Args:
        config: The run's config; `config.reporting()` sets the length of an iteration, smoothing and reductions.
        session: Provides the reports.
        metrics: The algorithm's MetricsLogger; values logged by callbacks and runners are added to the result.

    Attributes:
        is_cut_short: Whether `cut_short` was called for the current iteration.
        num_done: Number of completed iterations.
        last_training_s: Duration of the last iteration's training in seconds; None before the first.
        weights_version: Version of the weights after the newest update.
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
        self._runners_log: MetricsLogger = metrics
        self.episodes: EpisodeMetrics = EpisodeMetrics(config.metrics_num_episodes_for_smoothing)
        self._timers = StageTimers()
        self._learners = LearnerResults(self._timers, config.custom_stats_cls_lookup)
        self._steps_by_lag: Counter[int] = Counter()
        self._curve: deque[tuple[int, float]] = deque(maxlen=_MAX_CURVE)
        self._start = time.perf_counter()
        self._run_start = self._start
        self._time_before = 0.0
        self._num_steps_before = 0  # env steps sampled when the iteration began
        self._num_steps_reported = 0  # and up to the last result
        self._num_training_step_calls = 0
        self.weights_version: int = 0
        self._num_env_steps_trained = 0  # by the newest update
        self.num_env_steps_trained_lifetime: int = 0

    def begin(self) -> None:
        """Begin the next iteration."""
        self._start = time.perf_counter()
        self._timers.take()
        self._steps_by_lag.clear()
        self._num_training_step_calls = 0
        self._num_steps_before = self._session.accounting.sampled

    def add_training_step(self, returned: object, seconds: float) -> None:
        """Record the end of a `training_step`, and what its own calls of the groups have sampled and trained.

        Raises:
            ValueError: It returned something other than None.
        """
        if returned is not None:
            raise ValueError(
                f"training_step() returned a {type(returned).__name__}; expected None: report values through "
                "self.metrics.log_value(…)."
            )
        session, accounting = self._session, self._session.accounting
        runners, learners = session.env_runner_group, session.learner_group
        sampled, runners.sampled = runners.sampled, []
        for metas in sampled:
            accounting.add(sampled=sum(int(meta.get("num_env_steps", 0)) for meta in metas))
            add_fragment_metas(self.episodes, self._runners_log, metas)
        if len(self._metrics):  # perhaps with the runners' `get_metrics`
            logged = self._metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
            accounting.add(sampled=max(0, int(logged) - accounting.sampled))
        trained, learners.trained = learners.trained, []
        for results, num_env_steps in trained:
            # Steps that have been trained before (from a replay buffer) are not counted twice.
            accounting.add(trained=min(num_env_steps, accounting.pending))
            self._num_env_steps_trained = num_env_steps
            self.num_env_steps_trained_lifetime += num_env_steps
            self._learners.add(results)
        self._num_training_step_calls += 1
        self._timers.add("training_step", seconds)

    async def drain(self) -> None:
        """Wait until no update is open, and record the reports of updates that ran ahead of the training steps.

        Called before the learners' state is read or replaced.
        """
        for update in await self._session.pipeline.drain():
            self.add_update(update)
        for of_ranks in self._session.pipeline.take_learner_results():
            self._learners.add(of_ranks)

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
            or (min_sampled and self._session.accounting.sampled - self._num_steps_before < min_sampled)
            or (min_trained and self._num_training_step_calls * config.total_train_batch_size < min_trained)
        )

    def end(self) -> None:
        """End the training of the current iteration."""
        self.num_done += 1
        self.last_training_s = time.perf_counter() - self._start

    def add_update(self, update: UpdateResult) -> None:
        """Add the result of one update."""
        add_fragment_metas(self.episodes, self._runners_log, update.fragments)
        self._num_env_steps_trained = update.num_env_steps_trained
        self.num_env_steps_trained_lifetime += update.num_env_steps_trained
        self.weights_version = update.weights_version
        for lag, num_steps in update.steps_by_lag.items():
            self._steps_by_lag[lag] += num_steps
        for name, seconds in update.timers.items():
            self._timers.add(name, seconds)

    def hold_logged(self) -> None:
        """Keep values that runners log from the algorithm's MetricsLogger until `release_logged`."""
        self._runners_log = MetricsLogger(stats_cls_lookup=self._config.custom_stats_cls_lookup)

    def release_logged(self) -> None:
        """Merge the values kept since `hold_logged`, if any, into the algorithm's MetricsLogger."""
        held, self._runners_log = self._runners_log, self._metrics
        if held is not self._metrics:
            self._metrics.aggregate([held.reduce(compile=False)])

    def build_result(self, fault_tolerance: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the iteration that ended."""
        now = time.perf_counter()
        elapsed = now - self._start
        for of_ranks in self._session.pipeline.take_learner_results():
            self._learners.add(of_ranks)
        learners, replay_buffer = self._learners.reduce(
            num_env_steps_trained=self._num_env_steps_trained,
            num_env_steps_trained_lifetime=self.num_env_steps_trained_lifetime,
        )
        num_sampled = self._session.accounting.sampled
        env_runners = self.episodes.reduce()
        # The metadata that `episodes` counts is missing for steps that were sampled under a state replaced since.
        env_runners["num_env_steps_sampled"] = num_sampled - self._num_steps_reported
        env_runners[NUM_ENV_STEPS_SAMPLED_LIFETIME] = self._num_steps_reported = num_sampled
        num_new = num_sampled - self._num_steps_before
        env_runners["num_env_steps_sampled_lifetime_throughput"] = num_new / max(elapsed, 1e-9)
        env_runners["weights_seq_no"] = self.weights_version
        self._timers.add("training_iteration", elapsed)
        result = IterationResult(
            {
                "training_iteration": self.num_done,
                NUM_ENV_STEPS_SAMPLED_LIFETIME: num_sampled,
                "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
                "num_training_step_calls_per_iteration": self._num_training_step_calls,
                "time_this_iter_s": elapsed,
                "time_total_s": self._time_before + now - self._run_start,
                "env_runners": env_runners,
                "learners": learners,
                "timers": self._timers.reduce(),
                "policy_lag": _lag(self._steps_by_lag),
                "fault_tolerance": dict(fault_tolerance),
                "accounting": self._session.accounting.to_dict(),
            }
        )
        if replay_buffer:
            result[REPLAY_BUFFER_RESULTS] = replay_buffer
        logged = self._metrics.compile()
        # Values of users count, e.g. of an overridden `get_metrics`.
        own = logged.get(ENV_RUNNER_RESULTS, {})
        # A custom training step may have sampled, and logged the runners' metrics.
        has_sampled = NUM_ENV_STEPS_SAMPLED_LIFETIME in own
        for name, value in own.items():
            if has_sampled or not isinstance(value, Mapping):
                env_runners[name] = value
        result[NUM_ENV_STEPS_SAMPLED_LIFETIME] = env_runners[NUM_ENV_STEPS_SAMPLED_LIFETIME]
        merge_into(result, logged)
        result["bottleneck"] = judge(result)
        result["health"] = findings = self._health.examine(result)
        for name in findings.keys() - self._told:  # each kind once
            _log.warning("{cause}. {remedy}.".format_map(findings[name]))
        self._told |= findings.keys()
        num_steps = result[NUM_ENV_STEPS_SAMPLED_LIFETIME] or result["num_env_steps_trained_lifetime"]
        self._curve.append((num_steps, env_runners.get("episode_return_mean", math.nan)))
        result.curve = tuple(self._curve)
        return result

    def get_state(self) -> dict[str, Any]:
        """Return the component "algorithm" of a checkpoint: counters, smoothing windows and metrics."""
        results = {
            **self.episodes.get_state(),
            "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
            "time_total_s": self._time_before + time.perf_counter() - self._run_start,
            "weights_version": self.weights_version,
            "learner_metrics": without_objects(self._learners.metrics.get_state()),
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
            results = state["results"]
            self.episodes.set_state(results)
            self.num_env_steps_trained_lifetime = results["num_env_steps_trained_lifetime"]
            self._time_before = results["time_total_s"]
            self.weights_version = results["weights_version"]
            self._num_steps_reported = self._session.accounting.sampled
            self._curve.clear()
            if "learner_metrics" in results:
                self._learners.metrics.set_state(results["learner_metrics"])
        if "metrics" in state:
            self._metrics.set_state(state["metrics"])
        if "counters" in state:
            self.counters.clear()
            self.counters.update(state["counters"])


def _lag(steps: Counter[int]) -> dict[str, Any]:
    """Return the distribution of the lags of the iteration's trained env steps; {} if there are none."""
    if not steps:
        return {}
    largest, total = max(steps), 0
    counts = [0] * min(largest + 1, NUM_LAGS)
    for lag, num_steps in steps.items():
        counts[min(lag, NUM_LAGS - 1)] += num_steps
        total += lag * num_steps
    return {"min": min(steps), "mean": total / steps.total(), "max": largest, "num_env_steps": counts}


class LearnerResults:
    """What the learners report in an iteration: the newest update's values, and what all updates logged and took.

    Values are merged over the ranks by their reductions.

    Args:
        timers: Takes the times of the updates.
        stats_cls_lookup: See `MetricsLogger`.

    Attributes:
        metrics: The values that learners logged. It keeps the lifetime sums, which would otherwise be lost with a rank.
    """

    def __init__(
        self, timers: StageTimers, stats_cls_lookup: Mapping[str, type[StatsBase]] | None = None
    ) -> None:
        self.metrics: MetricsLogger = MetricsLogger(stats_cls_lookup=stats_cls_lookup)
        self._timers, self._lookup = timers, stats_cls_lookup
        self._newest: list[ReducedMetrics] = []
        self._merged: dict[str, Any] = {}
        self._replay_buffer: dict[str, Any] = {}

    def add(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Add the results of an update, by rank; none for a rank that has died with its own."""
        newest, logged = [], []
        for values in of_ranks:
            if not isinstance(values, ReducedMetrics):
                continue
            newest.append(values)
            logged.append({name: s for name, s in values.states.items() if isinstance(s, dict)})
            overall = values.get(ALL_MODULES, {})
            for name in _TIMERS:
                if name in overall:
                    self._timers.add(name, overall[name])
            if "connector_pipeline_timer" in (of_connector := overall.get(LEARNER_CONNECTOR, {})):
                self._timers.add("learner_connector_timer", of_connector["connector_pipeline_timer"])
        if newest:
            self._newest = newest
        if any(logged):
            self.metrics.aggregate(logged)

    def reduce(self, **counts: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the merged results by module, with these counts for all modules, and those of the replay buffers.

        Without new results they are those of the last call.
        """
        of_ranks, self._newest = self._newest, []
        if not of_ranks:
            return self._merged, self._replay_buffer
        if len(of_ranks) > 1:
            ranks = MetricsLogger(stats_cls_lookup=self._lookup)
            ranks.aggregate(of_ranks)
            of_ranks = [ranks.compile()]
        self._merged = merged = {}
        for module_id, values in of_ranks[0].items():
            merged[module_id] = {**values} if isinstance(values, Mapping) else {"value": values}
        overall = merged.setdefault(ALL_MODULES, {})
        if BATCH_SOURCE in overall:
            source = overall[BATCH_SOURCE] = {**overall[BATCH_SOURCE]}
            for name in ("source_id", "num_ranks", "num_added"):  # of a rank, for the account of env steps
                source.pop(name, None)
        self._replay_buffer = overall.pop(REPLAY_BUFFER_RESULTS, {})
        overall.update(counts)
        for module_id, logged in self.metrics.compile().items():
            merged.setdefault(module_id, {}).update(logged if isinstance(logged, dict) else {"value": logged})
        return self._merged, self._replay_buffer


def merge_into(target: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Add the entries of `extra` that `target` lacks, at any depth."""
    for name, value in extra.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            merge_into(target[name], value)
        else:
            target.setdefault(name, value)
