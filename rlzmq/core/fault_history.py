"""Verification of a run's recorded history (`rlzmq.core.faults`): nothing lost, nothing trained twice.

Each process records its own events.

| who     | events                                                                             |
|---------|------------------------------------------------------------------------------------|
| runner  | ``accepted`` (id, steps), ``committed`` (id), ``weights`` (generation, version)     |
| learner | ``formed`` (generation, next_update), ``trained`` (update, attempt, generation, ranges) |
| driver  | ``report`` (update, steps, fragments, accounting, lag), ``killed`` (place, pid),    |
|         | ``both_copies`` (pid): a runner and the broker were hit at the same time            |
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["History", "HistoryError", "Verdict", "check_history", "read_history"]

Event = dict[str, Any]
History = dict[tuple[str, int], list[Event]]
"""Events in order, by (place, pid)."""


class HistoryError(AssertionError):
    """A guarantee was violated. The message names it."""


@dataclass(frozen=True)
class Verdict:
    """Summary of a history without violations."""

    num_updates: int
    num_accepted: int
    num_trained_steps: int
    num_dropped_steps: int
    num_pending: int
    num_killed: int
    num_voided: int
    num_gone: int = 0
    greatest_lag: int = 0

    def __str__(self) -> str:
        return (
            f"{self.num_killed} killed, {self.num_updates} updates, {self.num_accepted} fragments accepted: "
            f"{self.num_trained_steps} steps trained once, {self.num_dropped_steps} dropped with a reason, "
            f"{self.num_pending} fragments pending at the end, "
            + (f"{self.num_gone} gone with both their copies, " if self.num_gone else "")
            + f"0 lost, 0 trained twice, 0 too old (at most {self.greatest_lag} versions) "
            f"({self.num_voided} updates were restarted by a later generation)"
        )


def read_history(directory: str | Path) -> History:
    """Read all files of a history. An incomplete last line is ignored."""
    history: History = {}
    for path in sorted(Path(directory).glob("*.jsonl")):
        place, _, pid = path.stem.rpartition(".")
        lines = path.read_text().split("\n")
        history[place, int(pid)] = [json.loads(line) for line in lines[:-1]]
    return history


def check_history(history: History) -> Verdict:
    """Verify the guarantees for a run without rollbacks.

    Raises:
        HistoryError: A guarantee is violated; the first violation is reported.
    """
    reports = [
        e for (place, _), events in history.items() if place == "driver" for e in _of(events, "report")
    ]
    killed = {
        (e["place"], e["pid"])
        for (place, _), events in history.items()
        if place == "driver"
        for e in _of(events, "killed")
    }
    _check_reports(reports)
    num_voided = _check_updates(history, reports)
    doubly_hit = {
        e["pid"]
        for (place, _), events in history.items()
        if place == "driver"
        for e in _of(events, "both_copies")
    }
    accepted, num_pending, num_gone = _check_accepted(history, reports, killed, doubly_hit)
    _check_weights(history)
    last: dict[str, Any] = reports[-1]["accounting"] if reports else {"trained": 0, "dropped": {}}
    return Verdict(
        num_updates=len(reports),
        num_accepted=accepted,
        num_trained_steps=last["trained"],
        num_dropped_steps=sum(last["dropped"].values()),
        num_pending=num_pending,
        num_killed=len(killed),
        num_voided=num_voided,
        num_gone=num_gone,
        greatest_lag=max((report.get("lag", 0) for report in reports), default=0),
    )


def _of(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _check_reports(reports: list[Event]) -> None:
    """Check that every update is reported once and in order, with correct accounting."""
    total = 0
    for index, report in enumerate(reports):
        expected = reports[0]["update"] + index
        if report["update"] != expected:
            raise HistoryError(f"update {expected} should be reported next, got update {report['update']}")
        account = report["accounting"]
        total += report["trained"]
        num_trained = account["trained"] + account["dropped"].get("buffer_lost", 0)
        if num_trained != total:
            raise HistoryError(
                f"update {expected}: the account has {num_trained} trained steps, the reports {total}"
            )
        bound = report.get("max_lag", -1)
        if 0 <= bound < report.get("lag", 0):
            raise HistoryError(
                f"update {expected}: a step was {report['lag']} versions old, {bound} are allowed"
            )
        settled = account["trained"] + sum(account["dropped"].values()) + account["pending"]
        if account["sampled"] != settled or account["pending"] < 0:
            raise HistoryError(f"update {expected}: the account does not add up: {account}")


def _check_updates(history: History, reports: list[Event]) -> int:
    """Check that one surviving generation trained each reported update, and that no step was trained by two."""
    trained: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    formed: list[Event] = []
    for (place, _), events in history.items():
        if place.startswith("learner"):
            formed.extend(_of(events, "formed"))
            for event in _of(events, "trained"):
                trained[event["update"]][event["generation"]].append(event)
    taken: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    num_voided = 0
    for report in reports:
        update = report["update"]
        by_generation = trained.get(update)
        if not by_generation:
            raise HistoryError(f"update {update} was reported, but no rank recorded that it trained it")
        last = max(by_generation)
        for generation in by_generation:
            voids = [f for f in formed if f["generation"] > generation and f["next_update"] <= update]
            if generation == last and voids:
                raise HistoryError(f"update {update} was reported, but its step was lost: {voids[0]}")
            if generation != last and not voids:
                raise HistoryError(f"update {update} was trained in generations {sorted(by_generation)}")
        num_voided += len(by_generation) - 1
        plans = {(e["attempt"], json.dumps(e["ranges"])) for e in by_generation[last]}
        if len(plans) > 1:
            raise HistoryError(f"update {update}: the ranks of generation {last} trained different batches")
        ranges = by_generation[last][0]["ranges"]
        if sum(num for _, _, num in ranges) != report["steps"]:
            raise HistoryError(f"update {update}: {ranges} are not the {report['steps']} steps reported")
        for fragment, first, num in ranges:
            for other, start, end in taken[fragment]:
                if first < end and start < first + num:
                    raise HistoryError(f"steps of fragment {fragment} were trained twice: {other}, {update}")
            taken[fragment].append((update, first, first + num))
    return num_voided


def _check_accepted(
    history: History, reports: list[Event], killed: set[tuple[str, int]], doubly_hit: set[int]
) -> tuple[int, int, int]:
    """Check that everything accepted before the driver's last report is accounted for.

    Fragments whose runner (a pid in `doubly_hit`) and broker died at the same time are excepted, since no copy exists.
    """
    reported: dict[str, int] = {}
    for report in reports:
        for fragment, num_steps in report["fragments"]:
            if fragment in reported:
                raise HistoryError(f"fragment {fragment} was reported twice")
            reported[fragment] = num_steps
    num_accepted = num_pending = num_gone = 0
    for process, events in history.items():
        if not process[0].startswith("runner"):
            continue
        accepted: dict[str, int] = {}
        for event in _of(events, "accepted"):
            accepted[event["id"]] = event["steps"]
        num_accepted += len(accepted)
        seqs = [int(fragment.rpartition("/")[2]) for fragment in accepted if fragment in reported]
        for fragment, num_steps in accepted.items():
            if fragment in reported:
                if reported[fragment] != num_steps:
                    raise HistoryError(f"fragment {fragment} of {num_steps} steps was reported as {reported}")
            elif process[1] in doubly_hit:
                num_gone += 1
            elif process in killed or int(fragment.rpartition("/")[2]) < max(seqs, default=-1):
                raise HistoryError(f"fragment {fragment} of {process[0]} was accepted and lost")
            else:
                num_pending += 1
    return num_accepted, num_pending, num_gone


def _check_weights(history: History) -> None:
    for (place, pid), events in history.items():
        orders = [(e["generation"], e["version"]) for e in _of(events, "weights")]
        for before, after in itertools.pairwise(orders):
            if after <= before:
                raise HistoryError(f"{place} (pid {pid}) loaded weights {after} after {before}")
