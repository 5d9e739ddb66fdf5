"""The checker of histories accepts a good one, and finds every way to break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.fault_history import History, HistoryError, check_history, read_history

RUNNER, LEARNER, DRIVER, BROKER = ("runner-0", 11), ("learner-0", 21), ("driver", 1), ("broker", 31)


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
        "broker": 1,
        "staleness": 0,
    }


def held(fragment: str, update: int, version: int | None = None) -> dict[str, Any]:
    return {
        "event": "held",
        "id": fragment,
        "version": update if version is None else version,
        "update": update,
    }


def serves(incarnation: int) -> dict[str, Any]:
    return {"event": "serves", "incarnation": incarnation, "first_attempt": 1000 * incarnation}


def ended(place: str, pid: int) -> dict[str, Any]:
    return {"event": "ended", "place": place, "pid": pid}


def good() -> History:
    """Two updates of 10 steps; rank 1 was killed in update 1, which was begun anew by generation 2."""

    def trained(update: int, generation: int, ranges: list[list[Any]]) -> dict[str, Any]:
        attempt = 1000 + 100 * generation + update
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
        BROKER: [
            serves(1),
            held("a/1/0", 0),
            held("a/1/1", 0),
            held("a/1/2", 1),
            held("a/1/3", 1),
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
    "an update nobody trained is reported": (
        lambda h: h[DRIVER].append(report(2, [], 30, 1)),
        "no rank recorded",
    ),
    "a reported step is lost by a reform": (
        lambda h: h[LEARNER].append({"event": "formed", "generation": 3, "next_update": 1}),
        "its step was lost",
    ),
    "an account does not add up": (
        change(DRIVER, 0, accounting={"sampled": 12, "trained": 10, "dropped": {}, "pending": 0}),
        "does not add up",
    ),
    "fewer steps are trained than reported": (change(LEARNER, 3, ranges=[["a/1/2", 0, 9]]), "not the 10"),
    "weights go back": (change(RUNNER, 5, generation=1), "loaded weights"),
    "a fragment stays with the broker forever": (
        lambda h: train_more(h, 4, broker=1),
        "a/1/3 of runner-0 was accepted and lost: the broker that held it reported 5 updates without it",
    ),
    "a runner does not send a fragment again to the next broker": (
        lambda h: begin_broker(h, 2, held("a/1/4", 2)),
        "a/1/3 of runner-0 was accepted and lost: its runner sent a/1/4 to the next broker without it",
    ),
    "a fragment is acknowledged that no broker held": (remove(BROKER, 4), "no broker held it"),
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


def train_more(history: History, num: int, broker: int) -> None:
    """Further updates of 10 steps of another runner, reported by this broker."""
    for _ in range(num):
        update = sum(event["event"] == "report" for event in history[DRIVER])
        fragment = f"b/1/{update}"
        history[DRIVER].append({**report(update, [[fragment, 10]], 10 * update + 10, 1), "broker": broker})
        history[LEARNER].append(
            {
                "event": "trained",
                "update": update,
                "generation": 2,
                "attempt": 1000 * broker + 200 + update,
                "rank": 0,
                "ranges": [[fragment, 0, 10]],
            }
        )


def begin_broker(history: History, incarnation: int, *events: dict[str, Any]) -> None:
    history["broker", 30 + incarnation] = [serves(incarnation), *events]


def test_a_fragment_is_gone_if_its_runner_and_its_broker_died_before_it_was_due() -> None:
    history = good()
    history[DRIVER].insert(0, ended(*RUNNER))
    train_more(history, 2, broker=1)
    begin_broker(history, 2)
    train_more(history, 2, broker=2)
    verdict = check_history(history)
    assert (verdict.num_pending, verdict.num_gone) == (0, 1)


def test_a_fragment_is_not_gone_while_one_of_its_holders_lives() -> None:
    history = good()
    begin_broker(history, 2)
    train_more(history, 2, broker=2)
    verdict = check_history(history)
    assert (verdict.num_pending, verdict.num_gone) == (1, 0), "its runner has it"
    history["broker", 32].append(held("a/1/3", 2))
    history[DRIVER].insert(0, ended(*RUNNER))
    verdict = check_history(history)
    assert (verdict.num_pending, verdict.num_gone) == (1, 0), "the next broker has it"
    train_more(history, 4, broker=2)
    with pytest.raises(HistoryError, match="a/1/3 of runner-0 was accepted and lost"):
        check_history(history)
