"""The checker of histories accepts a good one, and finds every way to break it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from rlzmq.core.fault_history import History, HistoryError, check_history, read_history


def report(update: int, fragments: list[list[Any]], trained: int, dropped: int = 0) -> dict[str, Any]:
    account = {
        "sampled": trained + dropped,
        "trained": trained,
        "dropped": {"surplus": dropped},
        "pending": 0,
    }
    return {
        "event": "report",
        "update": update,
        "steps": 10,
        "trained": 10,
        "fragments": fragments,
        "accounting": account,
        "generation": 1,
    }


def good() -> History:
    """Two updates of 10 steps; rank 1 was killed in update 1, which was begun anew by generation 2."""

    def trained(update: int, generation: int, ranges: list[list[Any]]) -> dict[str, Any]:
        attempt = 100 * generation + update
        return {
            "event": "trained",
            "update": update,
            "generation": generation,
            "attempt": attempt,
            "rank": 0,
            "ranges": ranges,
        }

    def formed(generation: int, next_update: int) -> dict[str, Any]:
        return {"event": "formed", "generation": generation, "next_update": next_update}

    first, second = [["a/1/0", 0, 8], ["a/1/1", 0, 2]], [["a/1/2", 0, 10]]
    return {
        ("runner-0", 11): [
            {"event": "weights", "generation": 1, "version": 0},
            {"event": "accepted", "id": "a/1/0", "steps": 8},
            {"event": "accepted", "id": "a/1/1", "steps": 3},
            {"event": "committed", "id": "a/1/0"},
            {"event": "weights", "generation": 1, "version": 1},
            {"event": "weights", "generation": 2, "version": 1},
            {"event": "accepted", "id": "a/1/2", "steps": 10},
            {"event": "accepted", "id": "a/1/3", "steps": 10},
        ],
        ("learner-0", 21): [formed(1, 0), trained(0, 1, first), formed(2, 1), trained(1, 2, second)],
        ("learner-1", 22): [formed(1, 0), trained(0, 1, first), trained(1, 1, second)],
        ("driver", 1): [
            report(0, [["a/1/0", 8], ["a/1/1", 3]], 10, 1),
            {"event": "killed", "place": "learner-1", "pid": 22},
            report(1, [["a/1/2", 10]], 20, 1),
        ],
    }


def test_a_history_that_keeps_every_promise_is_accepted() -> None:
    verdict = check_history(good())
    assert verdict.num_updates == 2
    assert verdict.num_accepted == 4
    assert verdict.num_pending == 1
    assert verdict.num_voided == 1
    assert verdict.num_killed == 1
    assert "0 lost, 0 trained twice" in str(verdict)


RUNNER, LEARNER, DRIVER = ("runner-0", 11), ("learner-0", 21), ("driver", 1)


def change(key: tuple[str, int], index: int, **facts: Any) -> Callable[[History], None]:
    return lambda history: history[key][index].update(facts)


def remove(key: tuple[str, int], index: int) -> Callable[[History], None]:
    return lambda history: history[key].pop(index) and None


BROKEN: dict[str, tuple[Callable[[History], Any], str]] = {
    "a fragment's report is missing": (
        change(DRIVER, 0, fragments=[["a/1/0", 8]]),
        "a/1/1 of runner-0 was accepted and lost",
    ),
    "a fragment is reported twice": (
        change(DRIVER, 2, fragments=[["a/1/2", 10], ["a/1/0", 8]]),
        "reported twice",
    ),
    "a step is trained twice": (
        change(LEARNER, 3, ranges=[["a/1/0", 7, 1], ["a/1/2", 0, 9]]),
        "a/1/0 were trained twice",
    ),
    "ranks train different batches": (change(("learner-1", 22), 1, ranges=[["a/1/0", 0, 10]]), "different"),
    "a report is missing": (remove(DRIVER, 0), "the account has 20"),
    "a report is repeated": (lambda h: h[DRIVER].append(copy.deepcopy(h[DRIVER][2])), "reported next"),
    "an update nobody trained is reported": (
        lambda h: h[DRIVER].append(report(2, [], 30, 1)),
        "no rank recorded",
    ),
    "a reported step is lost by a reform": (
        lambda h: h[LEARNER].append({"event": "formed", "generation": 3, "next_update": 1}),
        "its step was lost",
    ),
    "an update is trained in two generations": (
        change(LEARNER, 2, next_update=2),
        "trained in generations",
    ),
    "an account does not add up": (
        change(DRIVER, 0, accounting={"sampled": 12, "trained": 10, "dropped": {}, "pending": 0}),
        "does not add up",
    ),
    "fewer steps are trained than reported": (change(LEARNER, 3, ranges=[["a/1/2", 0, 9]]), "not the 10"),
    "weights go back": (change(RUNNER, 5, generation=1), "loaded weights"),
    "a killed runner's last fragment is lost": (
        lambda h: h[DRIVER].append({"event": "killed", "place": "runner-0", "pid": 11}),
        "a/1/3 of runner-0 was accepted and lost",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_found(name: str) -> None:
    break_it, message = BROKEN[name]
    history = good()
    break_it(history)
    with pytest.raises(HistoryError, match=message):
        check_history(history)


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Any) -> None:
    (tmp_path / "runner-0.7.jsonl").write_text('{"event": "weights"}\n{"event": "acc')
    assert read_history(tmp_path) == {("runner-0", 7): [{"event": "weights"}]}


def test_what_a_runner_and_the_broker_held_is_gone_where_both_were_hit_at_once() -> None:
    history = good()
    history["runner-0", 11].insert(4, {"event": "accepted", "id": "a/1/1b/1", "steps": 5})
    with pytest.raises(HistoryError, match="was accepted and lost"):
        check_history(history)
    history["driver", 1].append({"event": "both_copies", "place": "runner-0", "pid": 11})
    verdict = check_history(history)
    assert verdict.num_gone == 2, "this one, and the one that was pending"
    assert "2 gone with both their copies" in str(verdict)
