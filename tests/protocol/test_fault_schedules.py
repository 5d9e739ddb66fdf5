"""Whole runs under simulated faults, and the history checker that judges them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from history import History, HistoryError, Step
from simulation import Plan, Simulation, run_schedule

from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import FragmentRange

# More: python scripts/simulate_faults.py --schedules 100000
_NUM_SCHEDULES = 500


@pytest.mark.parametrize("first", range(0, _NUM_SCHEDULES, 250))
def test_every_promise_holds_under_every_schedule(first):
    num_faults = sum(run_schedule(seed).num_faults for seed in range(first, first + 250))
    assert num_faults > 100, "the schedules must contain faults to prove anything"


def test_a_schedule_is_replayed_by_its_seed():
    assert run_schedule(7).chain == run_schedule(7).chain


def test_each_kind_of_fault_occurs_in_the_schedules():
    kinds: dict[str, Callable[[History], bool]] = {
        "brokers": lambda history: history.num_brokers > 1,
        "rollbacks": lambda history: history.rollbacks > 0,
        "quarantined": lambda history: bool(history.quarantined),
        "generations": lambda history: len({step.generation for step in history.chain}) > 1,
        "versions": lambda history: len(history.versions) > 3,
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


# ------------------------------------------------------------------ the checker itself


def _fragment(seq: int) -> FragmentId:
    return FragmentId("runner", 1, seq)


def _good() -> History:
    """Two updates of four steps out of two fragments of four."""
    history = History(staleness=1, batch=4)
    history.finished = True
    history.sent = {_fragment(0), _fragment(1)}
    history.fragment_sizes = {_fragment(0): 4, _fragment(1): 4}
    history.fragment_versions = {_fragment(0): 0, _fragment(1): 0}
    history.versions = {"runner": [(1, 0), (1, 1), (2, 1)]}
    history.chain = [
        Step(0, 1, 1, (FragmentRange(_fragment(0), 0, 4),)),
        Step(1, 1, 2, (FragmentRange(_fragment(1), 0, 3), FragmentRange(_fragment(1), 3, 1))),
    ]
    history.final = {
        "sampled": 10,
        "trained": 8,
        "dropped": 1,
        "pending": 1,
        "skipped": 0,
        "num_reports": 2,
        "is_current": True,
        "pending_entries": 1,
    }
    return history


def test_the_checker_accepts_a_good_history():
    _good().check()


def _step(history: History, index: int, **changes) -> None:
    history.chain[index] = history.chain[index]._replace(**changes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda h: setattr(h, "finished", False), "no progress"),
        (lambda h: _step(h, 1, ranges=h.chain[0].ranges), "trained twice"),
        (lambda h: _step(h, 1, ranges=(FragmentRange(_fragment(0), 3, 4),)), "beyond its end"),
        (
            lambda h: _step(
                h, 1, ranges=(FragmentRange(_fragment(0), 3, 1), FragmentRange(_fragment(1), 0, 3))
            ),
            "trained twice",
        ),
        (lambda h: _step(h, 1, update_id=2), "stands at 1"),
        (lambda h: h.chain.reverse(), "stands at 0"),
        (lambda h: _step(h, 0, ranges=(FragmentRange(_fragment(0), 0, 3),)), "trained 3 steps"),
        (lambda h: h.sent.discard(_fragment(1)), "no runner sent it"),
        (lambda h: h.fragment_versions.update({_fragment(0): 1}), "before it existed"),
        (lambda h: setattr(h, "max_lag", 0), "of version 0 was trained in update 1"),
        (lambda h: h.versions["runner"].append((2, 1)), "applied weights"),
        (lambda h: h.versions["runner"].append((1, 9)), "applied weights"),
        (lambda h: h.final.update(skipped=1), "lie between"),
        (lambda h: h.final.update(sampled=11), "sampled != trained"),
        (lambda h: h.final.update(pending_entries=2), "not those of the ledger"),
        (lambda h: h.final.update(trained=7, sampled=9), "7 steps counted as trained"),
    ],
)
def test_the_checker_finds_broken_histories(damage, words):
    history = _good()
    damage(history)
    with pytest.raises(HistoryError, match=words):
        history.check()


def test_the_checker_finds_reports_that_are_missing_or_repeated():
    simulation = Simulation(
        dataclasses.replace(Plan.draw(0), faults_until=0.0, mean_time_between_crashes=1e9)
    )
    history = simulation.run()
    history.check()
    history.reports.append(history.reports[-1])
    with pytest.raises(HistoryError, match="was reported when"):
        history.check()
    history.reports[-2:] = []
    history.reports.pop(0)
    with pytest.raises(HistoryError, match="was reported when 0 was due"):
        history.check()


def test_a_broken_broker_is_caught(monkeypatch):
    """The whole chain of proof works: a ledger that forgets what it committed is found out."""
    from rlzmq.protocol.ledger import Ledger

    monkeypatch.setattr(Ledger, "is_committed", lambda self, fragment: False)
    with pytest.raises(AssertionError, match="schedule of seed"):
        _run_schedules(200)


def _run_schedules(num_schedules: int) -> None:
    for seed in range(num_schedules):
        run_schedule(seed)
