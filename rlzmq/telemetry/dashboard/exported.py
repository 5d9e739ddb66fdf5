"""Metrics of the watched runs, for Prometheus."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlzmq.protocol.ledger import DROP_REASONS
from rlzmq.telemetry.dashboard.watched import WatchedRun, runner_grid
from rlzmq.telemetry.runs import number_at, value_at

__all__ = ["ExportedRuns"]

_Values = dict[tuple[str, ...], float]  # by the labels' values
_OF_RESULTS = (
    ("rlzmq_iterations_total", "Iterations of training.", "training_iteration"),
    ("rlzmq_training_seconds_total", "Seconds of training.", "time_total_s"),
    ("rlzmq_episodes_total", "Episodes that ended.", "env_runners/num_episodes_lifetime"),
    ("rlzmq_episode_return_mean", "Mean return of the newest episodes.", "env_runners/episode_return_mean"),
    ("rlzmq_episode_return_min", "Smallest return of the newest episodes.", "env_runners/episode_return_min"),
    ("rlzmq_episode_return_max", "Largest return of the newest episodes.", "env_runners/episode_return_max"),
    ("rlzmq_policy_lag_max", "Weights versions that trained data was behind, at most.", "policy_lag/max"),
    (
        "rlzmq_restarted_runners_total",
        "Runner processes that were replaced.",
        "fault_tolerance/num_remote_worker_restarts",
    ),
    (
        "rlzmq_restarted_learners_total",
        "Learner processes that were replaced.",
        "fault_tolerance/num_learner_restarts",
    ),
)
"""Name, help text, and path in a result. A counter's name ends in _total."""

_STATES = {"s": "sampling", "i": "waiting", "u": "suspect", "g": "gone"}  # by letter, see `runner_grid`


class ExportedRuns(Collector):
    """Collects metrics of runs, labeled with ``run``, the run's name on the page."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have values."""
        for name, about, path in _OF_RESULTS:
            yield from self._by_run(name, about, functools.partial(_in_result, path))
        yield from self._by_run("rlzmq_run_is_running", "1 while the run trains.", _is_running)
        runs = self._runs
        yield from _family(
            "rlzmq_env_steps_total", "Env steps, sampled and trained.", ("what",), _steps(runs)
        )
        yield from _family(
            "rlzmq_dropped_env_steps_total", "Dropped env steps, by reason.", ("reason",), _dropped(runs)
        )
        yield from _family("rlzmq_runners", "Env runners, by state.", ("state",), _runners(runs))
        yield from _family(
            "rlzmq_stage_share",
            "Share of a role's time that a stage takes, in the newest iteration.",
            ("role", "stage"),
            _stage_shares(runs),
        )
        yield from self._by_run(
            "rlzmq_broker_loop_lag_seconds",
            "Lag of the broker's event loop.",
            functools.partial(_in_status, "loop_lag_s"),
        )
        yield from self._by_run(
            "rlzmq_broker_held_bytes",
            "Fragments that the broker holds.",
            functools.partial(_in_status, "fragment_bytes"),
        )

    def _by_run(
        self, name: str, about: str, value_of: Callable[[WatchedRun], float | None]
    ) -> Iterator[Metric]:
        found = ((run, value_of(run)) for run in self._runs)
        return _family(name, about, (), {(run.label,): value for run, value in found if value is not None})


def _family(name: str, about: str, labels: Sequence[str], values: _Values) -> Iterator[Metric]:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, about, labels=["run", *labels])
    for of_labels, value in values.items():
        family.add_metric(of_labels, value)
    if values:
        yield family


def _in_result(path: str, run: WatchedRun) -> float | None:
    return number_at(run.tail.newest, path)


def _in_status(key: str, run: WatchedRun) -> float | None:
    return number_at(_status(run), key)


def _is_running(run: WatchedRun) -> float:
    return float(run.state == "running")


def _status(run: WatchedRun) -> Mapping[str, Any]:
    return (run.live.status if run.live is not None else None) or {}


def _account(run: WatchedRun) -> Mapping[str, Any]:
    return _status(run).get("accounting") or value_at(run.tail.newest, "accounting") or {}


def _steps(runs: Sequence[WatchedRun]) -> _Values:
    return {
        (run.label, what): _account(run)[what]
        for run in runs
        for what in ("sampled", "trained")
        if what in _account(run)
    }


def _dropped(runs: Sequence[WatchedRun]) -> _Values:
    return {
        (run.label, reason): number
        for run in runs
        if _account(run)
        # Reasons without drops, too: a rate needs a value before the first drop.
        for reason, number in {
            **dict.fromkeys(DROP_REASONS, 0),
            **(_account(run).get("dropped") or {}),
        }.items()
    }


def _runners(runs: Sequence[WatchedRun]) -> _Values:
    values: _Values = {}
    for run in runs:
        if not _status(run) or run.live is None:
            continue
        counts = Counter(_STATES[letter] for letter in runner_grid(run.live)["states"])
        values |= {(run.label, state): counts[state] for state in _STATES.values()}
    return values


def _stage_shares(runs: Sequence[WatchedRun]) -> _Values:
    return {
        (run.label, role, stage): share
        for run in runs
        for role, shares in (value_at(run.tail.newest, "bottleneck/shares") or {}).items()
        for stage, share in shares.items()
    }
