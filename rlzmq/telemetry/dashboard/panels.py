"""What is shown of runs: the panels' content as plain values, curves for a picture, and metrics for Prometheus.

Curves are reduced to the picture's width: exact for few points, the extremes of each pixel for many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlzmq.algorithms.health import judge
from rlzmq.algorithms.results import NUM_LAGS
from rlzmq.protocol.ledger import DROP_REASONS
from rlzmq.telemetry.dashboard.watched import WatchedRun, runner_grid
from rlzmq.telemetry.runs import number_at, value_at

__all__ = ["Columns", "ExportedRuns", "curves_for_width", "panels_of"]

Columns: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Columns of one run ``[N]``: ``"x"``, ascending, ``"mean"``, and the bounds ``"low"`` and ``"high"``."""
_Y = ("mean", "low", "high")


def panels_of(run: WatchedRun) -> dict[str, Any]:
    """Return the content of each panel of a run, by the panel's name."""
    # Trained env steps by policy lag in weights versions; the last bin may be open.
    steps_by_lag = run.tail.steps_by_lag
    account = _account(run)  # of env steps
    reasons = {reason: number for reason, number in (account.get("dropped") or {}).items() if number}
    return {
        "stages": _stages(run.tail.newest),
        "lag": {"steps": steps_by_lag, "is_open": len(steps_by_lag) == NUM_LAGS},
        "drops": {"sampled": account.get("sampled"), "trained": account.get("trained"), "reasons": reasons},
        "grid": _grid(run),
        "events": run.events,
    }


def _stages(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict of a result, the shares of each role's stages ({} without timers), and what is not healthy."""
    try:
        health = result.get("health") or {}
        found = [f"{name}: {one['cause']}. {one['remedy']}." for name, one in health.items()]
        return {**judge(result), "health": found}
    except (KeyError, TypeError, AttributeError):  # a function's trial may report anything
        return {"stage": "unknown", "advice": "", "shares": {}, "health": []}


def _grid(run: WatchedRun) -> dict[str, Any]:
    healthy = value_at(run.tail.newest, "fault_tolerance/num_healthy_workers")
    grid: dict[str, Any] = runner_grid(run.live if run.may_be_asked else None)
    if not run.may_be_asked:
        why = f"the run is {run.state}" if run.state.startswith("on ") else "the run has ended"
        grid["problem"] = "a trial's are not shown" if run.run is None else why
    return {"run": run.run_id, "num_healthy": healthy, **grid}


def curves_for_width(
    runs: Sequence[Columns], width: int, begin: float | None = None, end: float | None = None
) -> tuple[NDArray[np.float64], list[dict[str, NDArray[np.float64]]]]:
    """Return common x values and the curves of all runs at them.

    If all runs together have more than four points per pixel, each pixel has two x values: the curve's smallest and
    largest value there, in their original order, with the extremes of ``low`` and ``high``.

    Args:
        runs: The runs.
        width: Width of the picture in pixels.
        begin, end: The x range; None: that of the data. One point beyond each end is included.

    Returns:
        x ``[M]``, at most ``4 * width`` values, and ``mean``, ``low``, ``high`` of each run ``[M]``; NaN
        where a run has no value.
    """
    runs = [_finite(run) for run in runs]
    ends = [run["x"][[0, -1]] for run in runs if len(run["x"])]
    if not ends:
        nothing = np.empty(0)
        return nothing, [dict.fromkeys(_Y, nothing) for _ in runs]
    begin = min(float(both[0]) for both in ends) if begin is None else begin
    end = max(float(both[1]) for both in ends) if end is None else end
    seen = [_between(run, begin, end) for run in runs]
    if sum(len(run["x"]) for run in seen) <= 4 * width or end <= begin:
        return _exactly(seen)
    return _by_pixel(seen, np.linspace(begin, end, width + 1))


def _finite(run: Columns) -> Columns:
    is_known = np.isfinite(run["x"]) & np.isfinite(run["mean"])
    return run if is_known.all() else {name: values[is_known] for name, values in run.items()}


def _between(run: Columns, begin: float, end: float) -> Columns:
    first = max(int(np.searchsorted(run["x"], begin, "left")) - 1, 0)
    last = int(np.searchsorted(run["x"], end, "right")) + 1
    return {name: values[first:last] for name, values in run.items()}


def _exactly(
    runs: Sequence[Columns],
) -> tuple[NDArray[np.float64], list[dict[str, NDArray[np.float64]]]]:
    x = np.unique(np.concatenate([run["x"] for run in runs]))
    curves = []
    for run in runs:
        places = np.searchsorted(x, run["x"])
        curve = {name: np.full(len(x), np.nan) for name in _Y}
        for name in _Y:
            curve[name][places] = run[name]
        curves.append(curve)
    return x, curves


def _by_pixel(
    runs: Sequence[Columns], edges: NDArray[np.float64]
) -> tuple[NDArray[np.float64], list[dict[str, NDArray[np.float64]]]]:
    width = len(edges) - 1
    pixel = edges[1] - edges[0]
    x = (edges[:-1, None] + pixel * np.array([0.25, 0.75])).ravel()
    curves = []
    for run in runs:
        bounds = np.searchsorted(run["x"], edges)
        bounds[0], bounds[-1] = 0, len(run["x"])  # includes the points next to the range
        filled = np.flatnonzero(np.diff(bounds))
        starts = bounds[filled]
        curve = {name: np.full((width, 2), np.nan) for name in _Y}
        if len(filled):
            mean = run["mean"]
            places = np.array(
                [
                    sorted((start + part.argmin(), start + part.argmax()))
                    for start, part in zip(starts, np.split(mean, starts[1:]), strict=True)
                ]
            )
            curve["mean"][filled] = mean[places]
            curve["low"][filled] = np.fmin.reduceat(run["low"], starts)[:, None]
            curve["high"][filled] = np.fmax.reduceat(run["high"], starts)[:, None]
        curves.append({name: values.ravel() for name, values in curve.items()})
    return x, curves


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


_OF_BROKER = (
    ("rlzmq_broker_loop_lag_seconds", "Lag of the broker's event loop.", "loop_lag_s"),
    ("rlzmq_broker_held_bytes", "Fragments that the broker holds.", "fragment_bytes"),
)
"""Name, help text, and path in a broker's status."""


class ExportedRuns(Collector):
    """Collects metrics of runs, labeled with ``run``, the run's name on the page."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have values."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for run in self._runs:
            for name, about, labels, value in _metrics_of(run):
                if name not in families:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    families[name] = kind(name, about, labels=["run", *labels])
                families[name].add_metric([run.label, *labels.values()], value)
        yield from families.values()


def _metrics_of(run: WatchedRun) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """Yield name, help text, labels and value of a run's metrics."""
    newest, status, account = run.tail.newest, _status(run), _account(run)
    for source, rows in ((newest, _OF_RESULTS), (status, _OF_BROKER)):
        for name, about, path in rows:
            if (value := number_at(source, path)) is not None:
                yield name, about, {}, value
    yield "rlzmq_run_is_running", "1 while the run trains.", {}, float(run.state == "running")
    for what in ("sampled", "trained"):
        if what in account:
            about = "Env steps, sampled and trained."
            yield "rlzmq_env_steps_total", about, {"what": what}, account[what]
    # Reasons without drops, too: a rate needs a value before the first drop.
    dropped = {**dict.fromkeys(DROP_REASONS, 0), **(account.get("dropped") or {})} if account else {}
    for reason, number in dropped.items():
        about = "Dropped env steps, by reason."
        yield "rlzmq_dropped_env_steps_total", about, {"reason": reason}, number
    counts = Counter(runner_grid(run.live)["states"])
    for letter, state in _STATES.items() if status else ():
        yield "rlzmq_runners", "Env runners, by state.", {"state": state}, counts[letter]
    for role, shares in (value_at(newest, "bottleneck/shares") or {}).items():
        for stage, share in shares.items():
            about = "Share of a role's time that a stage takes, in the newest iteration."
            yield "rlzmq_stage_share", about, {"role": role, "stage": stage}, share


def _status(run: WatchedRun) -> Mapping[str, Any]:
    return (run.live.status if run.live is not None else None) or {}


def _account(run: WatchedRun) -> Mapping[str, Any]:
    return _status(run).get("accounting") or value_at(run.tail.newest, "accounting") or {}
