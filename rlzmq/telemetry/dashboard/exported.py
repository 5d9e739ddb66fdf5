"""Metrics of the watched runs, for Prometheus."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlzmq.protocol.ledger import DROP_REASONS
from rlzmq.telemetry.dashboard.watched import WatchedRun, runner_grid
from rlzmq.telemetry.metric_paths import number_at, value_at
from rlzmq.telemetry.prometheus import Labels, Metric

__all__ = ["metrics_of"]

_Kind = Literal["counter", "gauge"]
_OF_RESULTS: tuple[tuple[str, _Kind, str, str], ...] = (
    ("rlzmq_iterations_total", "counter", "Iterations of training.", "training_iteration"),
    ("rlzmq_training_seconds_total", "counter", "Seconds of training.", "time_total_s"),
    (
        "rlzmq_episodes_total",
        "counter",
        "Episodes that ended.",
        "env_runners/num_episodes_lifetime",
    ),
    (
        "rlzmq_episode_return_mean",
        "gauge",
        "Mean return of the newest episodes.",
        "env_runners/episode_return_mean",
    ),
    (
        "rlzmq_episode_return_min",
        "gauge",
        "Smallest return of the newest episodes.",
        "env_runners/episode_return_min",
    ),
    (
        "rlzmq_episode_return_max",
        "gauge",
        "Largest return of the newest episodes.",
        "env_runners/episode_return_max",
    ),
    (
        "rlzmq_policy_lag_max",
        "gauge",
        "Weights versions that trained data was behind, at most.",
        "policy_lag/max",
    ),
    (
        "rlzmq_restarted_runners_total",
        "counter",
        "Runner processes that were replaced.",
        "fault_tolerance/num_remote_worker_restarts",
    ),
    (
        "rlzmq_restarted_learners_total",
        "counter",
        "Learner processes that were replaced.",
        "fault_tolerance/num_learner_restarts",
    ),
)
"""Name, kind, help text, and path in a result."""

_STATES = {"s": "sampling", "i": "waiting", "u": "suspect", "g": "gone"}  # by letter, see `runner_grid`


def metrics_of(runs: Sequence[WatchedRun]) -> list[Metric]:
    """Return the metrics of runs, labeled with ``run``, the run's name on the page."""
    metrics = [
        Metric(name, kind, about, _by_run(runs, functools.partial(_in_result, path)))
        for name, kind, about, path in _OF_RESULTS
    ]
    metrics += [
        Metric("rlzmq_run_is_running", "gauge", "1 while the run trains.", _by_run(runs, _is_running)),
        Metric("rlzmq_env_steps_total", "counter", "Env steps, sampled and trained.", _steps(runs)),
        Metric("rlzmq_dropped_env_steps_total", "counter", "Dropped env steps, by reason.", _dropped(runs)),
        Metric("rlzmq_runners", "gauge", "Env runners, by state.", _runners(runs)),
        Metric(
            "rlzmq_stage_share",
            "gauge",
            "Share of a role's time that a stage takes, in the newest iteration.",
            _stage_shares(runs),
        ),
    ]
    metrics += [
        Metric(name, "gauge", about, _by_run(runs, functools.partial(_in_status, key)))
        for name, about, key in (
            ("rlzmq_broker_loop_lag_seconds", "Lag of the broker's event loop.", "loop_lag_s"),
            ("rlzmq_broker_held_bytes", "Fragments that the broker holds.", "fragment_bytes"),
        )
    ]
    return [metric for metric in metrics if metric.values]


def _by_run(
    runs: Sequence[WatchedRun], value_of: Callable[[WatchedRun], float | None]
) -> dict[Labels, float]:
    found = ((run, value_of(run)) for run in runs)
    return {(("run", run.label),): value for run, value in found if value is not None}


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


def _steps(runs: Sequence[WatchedRun]) -> dict[Labels, float]:
    return {
        (("run", run.label), ("what", what)): _account(run)[what]
        for run in runs
        for what in ("sampled", "trained")
        if what in _account(run)
    }


def _dropped(runs: Sequence[WatchedRun]) -> dict[Labels, float]:
    return {
        (("run", run.label), ("reason", reason)): number
        for run in runs
        if _account(run)
        # Reasons without drops, too: a rate needs a value before the first drop.
        for reason, number in {
            **dict.fromkeys(DROP_REASONS, 0),
            **(_account(run).get("dropped") or {}),
        }.items()
    }


def _runners(runs: Sequence[WatchedRun]) -> dict[Labels, float]:
    values: dict[Labels, float] = {}
    for run in runs:
        if not _status(run) or run.live is None:
            continue
        counts = Counter(_STATES[letter] for letter in runner_grid(run.live)["states"])
        values |= {(("run", run.label), ("state", state)): counts[state] for state in _STATES.values()}
    return values


def _stage_shares(runs: Sequence[WatchedRun]) -> dict[Labels, float]:
    return {
        (("run", run.label), ("role", role), ("stage", stage)): share
        for run in runs
        for role, shares in (value_at(run.tail.newest, "bottleneck/shares") or {}).items()
        for stage, share in shares.items()
    }
