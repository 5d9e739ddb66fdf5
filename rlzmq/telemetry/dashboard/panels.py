"""The content of a run's panels as plain values: stages, lag, drops, runners, events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlzmq.algorithms.results import NUM_LAGS
from rlzmq.algorithms.verdict import judge
from rlzmq.telemetry.dashboard.live import runner_grid
from rlzmq.telemetry.dashboard.metrics_tail import MetricsTail
from rlzmq.telemetry.dashboard.watched import WatchedRun
from rlzmq.telemetry.metric_paths import value_at

__all__ = ["panels_of"]


def panels_of(run: WatchedRun) -> dict[str, Any]:
    """Return the content of each panel of a run, by the panel's name."""
    return {
        "stages": _stages(run.tail.newest),
        "lag": _lag_histogram(run.tail),
        "drops": _drops(run),
        "grid": _grid(run),
        "events": run.events,
    }


def _stages(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict of a result and the shares of each role's stages; {"shares": {}} if it has no timers."""
    try:
        return judge(result).to_dict()
    except (KeyError, TypeError, AttributeError):  # a function's trial may report anything
        return {"stage": "unknown", "advice": "", "shares": {}}


def _lag_histogram(tail: MetricsTail) -> dict[str, Any]:
    """Return the number of trained env steps by policy lag, in weights versions; whether the last bin is open."""
    steps = tail.steps_by_lag
    return {"steps": steps, "is_open": len(steps) == NUM_LAGS}


def _drops(run: WatchedRun) -> dict[str, Any]:
    """Return the account of env steps, from the broker if it is known, else from the newest result."""
    status = run.live.status if run.live is not None else None
    account = status["accounting"] if status is not None else value_at(run.tail.newest, "accounting")
    account = account or {}
    reasons = {reason: number for reason, number in (account.get("dropped") or {}).items() if number}
    return {"sampled": account.get("sampled"), "trained": account.get("trained"), "reasons": reasons}


def _grid(run: WatchedRun) -> dict[str, Any]:
    healthy = value_at(run.tail.newest, "fault_tolerance/num_healthy_workers")
    grid: dict[str, Any] = runner_grid(run.live)
    if not run.may_be_asked:
        where = run.state if run.state.startswith("on ") else ""
        is_trial = run.run is None
        reason = (
            "a trial's are not shown" if is_trial else f"the run is {where}" if where else "the run has ended"
        )
        grid |= runner_grid(None) | {"problem": reason}
    return {"run": run.run_id, "num_healthy": healthy, **grid}
