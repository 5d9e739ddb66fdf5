"""Whole runs under simulated faults, and the history checker that judges them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from history import History
from simulation import Plan, Simulation, run_schedule

from rlzmq.protocol import driver_core
from rlzmq.protocol.broker import updates
from rlzmq.protocol.driver_core import DriverCore, parse_report
from rlzmq.protocol.ledger import Ledger
from rlzmq.protocol.runner_core import WeightsReceiver


# More: python scripts/simulate_faults.py --schedules 100000
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (125, 250, 375))])
def test_every_promise_holds_under_every_schedule(first):
    num_faults = sum(run_schedule(seed).num_faults for seed in range(first, first + 125))
    assert num_faults > 100, "the schedules must contain faults to prove anything"


def test_a_schedule_is_replayed_by_its_seed():
    assert run_schedule(7).chain == run_schedule(7).chain


def test_each_kind_of_fault_occurs_in_the_schedules():
    kinds: dict[str, Callable[[History], bool]] = {
        "brokers": lambda history: history.num_brokers > 1,
        "rollbacks": lambda history: history.rollbacks > 0,
        "quarantined": lambda history: bool(history.quarantined),
        "generations": lambda history: len({step.generation for step in history.chain}) > 1,
    }
    missing = set(kinds)
    for seed in range(120):
        history = run_schedule(seed)
        missing -= {kind for kind in missing if kinds[kind](history)}
        if not missing:
            break
    assert not missing


def test_without_faults_nothing_is_dropped():
    plan = dataclasses.replace(
        Plan.draw(0),
        staleness=0,
        num_runners=1,
        num_ranks=1,
        num_updates=5,
        drop=0.0,
        duplicate=0.0,
        slow=0.0,
        faults_until=0.0,
        mean_time_between_crashes=1e9,
        poison=False,
        killer=False,
    )
    simulation = Simulation(plan)
    simulation.run().check()
    assert simulation.broker is not None
    accounting = simulation.broker.state.ledger.accounting
    assert not accounting.dropped
    assert accounting.trained < 5 * (simulation.history.batch + plan.num_envs)
    assert accounting.num_duplicates == 0


def _apply_any(self: WeightsReceiver, header: Any, body: Any) -> bool:
    self.generation, self.version = header.order
    return bool(header.has_body)


def _report_all(self: DriverCore, message: Any, payload: Any) -> list[Any]:
    self.next_report = max(self.next_report, message.update_id + 1)
    self._on_report(parse_report(message, payload))
    return []


def _parse_without_the_first(message: Any, payload: Any) -> Any:
    report = parse_report(message, payload)
    return dataclasses.replace(report, fragments=report.fragments[1:])


BROKEN: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "what is committed is forgotten": (Ledger, "is_committed", lambda *args: False),
    "what an earlier broker trained is not counted": (updates.Updates, "_take_over", lambda *args: None),
    "old data is used": (updates.Updates, "_drop_older", lambda *args: None),
    "an environment's steps go to any rank": (
        updates,
        "shards_by_env",
        lambda ledger, ranges, num_ranks: [ranges[rank::num_ranks] for rank in range(num_ranks)],
    ),
    "any weights are applied": (WeightsReceiver, "offer", _apply_any),
    "reports leave a fragment out": (driver_core, "parse_report", _parse_without_the_first),
    "reports are not told apart": (DriverCore, "_take_report", _report_all),
    "nobody is told to train": (updates.Updates, "on_ready", lambda *args: None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole chain of proof works: each of these is found out by a schedule."""
    monkeypatch.setattr(*BROKEN[name])
    with pytest.raises(AssertionError, match="schedule of seed"):  # noqa: PT012
        for seed in range(200):
            run_schedule(seed)
