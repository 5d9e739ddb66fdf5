"""Verification of a run's recorded history (`rlzmq.core.faults`): nothing lost, nothing trained twice.

Each process records its own events.

| who     | events                                                                             |
|---------|------------------------------------------------------------------------------------|
| runner  | ``accepted`` (id, steps), ``committed`` (id), ``weights`` (generation, version)     |
| broker  | ``serves`` (incarnation, first_attempt), ``held`` (id, version, update): accepted   |
|         | while `update` was the next to commit, ``finished`` (id): refused, or known as ended |
| learner | ``formed`` (generation, next_update), ``trained`` (update, attempt, generation, ranges) |
| driver  | ``report`` (update, broker, steps, fragments, accounting, lag, staleness),          |
|         | ``killed`` (place, pid) by a test, ``ended`` (place, pid) for any reason            |

*When a fragment may be gone.* Its copies are those of its runner and of each broker that held it. It is gone without a
broken guarantee only if all of these processes ended, and none of them was late with it: a broker must have
reported it before data that it would train later, and a runner must have sent it to the next broker before its
later fragments.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
History = dict[tuple[str, int], list[Event]]
"""Events in order, by (place, pid)."""


# A broker's data is in S + 1 slots of a batch each, and is trained in order, so it is reported with one of the next
# S + 1 commits. After a restart there may be more data, and updates that the ranks already had.
_REPORTS_AFTER_SLOTS = 4


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


def check_history(history: History, *, keeps_order: bool = True) -> Verdict:
    """Verify the guarantees for a run without rollbacks.

    Args:
        history: The events of all processes.
        keeps_order: Whether messages between two processes arrive as they were sent, as those of sockets do.

    Raises:
        HistoryError: A guarantee is violated; the first violation is reported.
    """
    of_driver = [e for (place, _), events in history.items() if place == "driver" for e in events]
    reports = _of(of_driver, "report")
    _check_reports(reports)
    updates = _check_updates(history, reports)
    num_accepted, num_pending, num_gone = _check_accepted(
        history, reports, _Copies(history, of_driver, updates, keeps_order)
    )
    check_weights(history)
    last: dict[str, Any] = reports[-1]["accounting"] if reports else {"trained": 0, "dropped": {}}
    return Verdict(
        num_updates=len(reports),
        num_accepted=num_accepted,
        num_trained_steps=last["trained"],
        num_dropped_steps=sum(last["dropped"].values()),
        num_pending=num_pending,
        num_killed=len(_processes(of_driver, "killed")),
        num_voided=sum(update.num_voided for update in updates),
        num_gone=num_gone,
        greatest_lag=max((report.get("lag", 0) for report in reports), default=0),
    )


@dataclass(frozen=True)
class _Update:
    """A reported update, as it was trained.

    Attributes:
        broker: Incarnation of the broker that reported it; another one may have planned it.
        attempt: Number of its plan.
        ranges: What it trained: fragment, first step, number of steps.
        num_voided: Number of earlier generations that trained it in vain.
    """

    update_id: int
    broker: int
    attempt: int
    ranges: list[tuple[str, int, int]]
    num_voided: int


def _of(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _processes(events: list[Event], name: str) -> set[tuple[str, int]]:
    return {(event["place"], event["pid"]) for event in _of(events, name)}


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


def _check_updates(history: History, reports: list[Event]) -> list[_Update]:
    """Check that one surviving generation trained each reported update, and that no step was trained by two."""
    trained: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    formed: list[Event] = []
    for (place, _), events in history.items():
        if place.startswith("learner"):
            formed.extend(_of(events, "formed"))
            for event in _of(events, "trained"):
                trained[event["update"]][event["generation"]].append(event)
    taken: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    updates: list[_Update] = []
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
        plans = {(e["attempt"], json.dumps(e["ranges"])) for e in by_generation[last]}
        if len(plans) > 1:
            raise HistoryError(f"update {update}: the ranks of generation {last} trained different batches")
        attempt, ranges = by_generation[last][0]["attempt"], by_generation[last][0]["ranges"]
        if sum(num for _, _, num in ranges) != report["steps"]:
            raise HistoryError(f"update {update}: {ranges} are not the {report['steps']} steps reported")
        for fragment, first, num in ranges:
            for other, start, end in taken[fragment]:
                if first < end and start < first + num:
                    raise HistoryError(f"steps of fragment {fragment} were trained twice: {other}, {update}")
            taken[fragment].append((update, first, first + num))
        updates.append(_Update(update, report["broker"], attempt, ranges, len(by_generation) - 1))
    return updates


@dataclass
class _Broker:
    """What one broker process did with fragments.

    Attributes:
        held: The accepted fragments, in order.
        finished: Fragments whose end it decided, or knew, when they arrived.
        next_attempt: First number of the next broker's plans.
    """

    process: tuple[str, int]
    incarnation: int
    first_attempt: int
    held: dict[str, Event]
    finished: set[str]
    next_attempt: float = math.inf

    def has_planned(self, update: _Update) -> bool:
        return self.first_attempt <= update.attempt < self.next_attempt


class _Copies:
    """The copies of fragments that no report contains: who has had them, and whether they should have been reported.

    Attributes:
        num_trained: Number of steps of each fragment that reported updates trained.
    """

    def __init__(
        self, history: History, of_driver: list[Event], updates: list[_Update], keeps_order: bool
    ) -> None:
        self._updates, self._keeps_order = updates, keeps_order
        self._brokers = sorted(
            (
                _Broker(
                    (place, pid),
                    serves["incarnation"],
                    serves["first_attempt"],
                    {event["id"]: event for event in _of(events, "held")},
                    {event["id"] for event in _of(events, "finished")},
                )
                for (place, pid), events in history.items()
                if place == "broker"
                for serves in _of(events, "serves")
            ),
            key=lambda broker: broker.incarnation,
        )
        for broker, following in itertools.pairwise(self._brokers):
            broker.next_attempt = following.first_attempt
        # After the last report the run itself ends its processes.
        last = max((index for index, event in enumerate(of_driver) if event["event"] == "report"), default=0)
        self._ended = _processes(of_driver[:last], "ended") | _processes(of_driver[:last], "killed")
        self._ended |= {broker.process for broker in self._brokers[:-1]}
        reports = _of(of_driver, "report")
        self.num_trained: Counter[str] = Counter()
        for update in updates:
            for fragment, _, num_steps in update.ranges:
                self.num_trained[fragment] += num_steps
        self._limit = _REPORTS_AFTER_SLOTS + max((report["staleness"] for report in reports), default=0)

    def are_gone(self, fragment: str, runner: tuple[str, int]) -> bool:
        """Return whether all processes with a copy have ended.

        Raises:
            HistoryError: They should have reported the fragment before, or passed it on.
        """
        holders = [broker for broker in self._brokers if fragment in broker.held]
        if any(fragment in broker.finished for broker in self._brokers if broker not in holders):
            return False  # dropped with a reason, which the account has
        if not holders:
            raise HistoryError(f"fragment {fragment} of {runner[0]} was acknowledged, but no broker held it")
        for broker in holders:
            reason = self._why_late(fragment, broker)
            if reason:
                raise HistoryError(f"fragment {fragment} of {runner[0]} was accepted and lost: {reason}")
        for broker in self._brokers[self._brokers.index(holders[-1]) + 1 :]:
            later = [other for other in broker.held if _is_later(other, fragment)]
            if later and self._keeps_order:
                raise HistoryError(
                    f"fragment {fragment} of {runner[0]} was accepted and lost: its runner sent {later[0]} to the next "
                    "broker without it"
                )
        return runner in self._ended and all(broker.process in self._ended for broker in holders)

    def _why_late(self, fragment: str, broker: _Broker) -> str:
        """Return why a broker that held the fragment should have reported it; "" if it had no occasion to."""
        held = broker.held[fragment]
        order = list(broker.held)
        after = {
            other
            for other in order[order.index(fragment) :]
            if _is_later(other, fragment) and broker.held[other]["version"] >= held["version"]
        }
        of_broker = [update for update in self._updates if update.broker == broker.incarnation]
        for update in of_broker:
            if broker.has_planned(update) and (later := after.intersection(f for f, _, _ in update.ranges)):
                return f"update {update.update_id} trained {min(later)}, which came after it"
        since = [update for update in of_broker if update.update_id >= held["update"]]
        if len(since) >= self._limit:
            return f"the broker that held it reported {len(since)} updates without it"
        return ""


def _is_later(fragment: str, other: str) -> bool:
    """Return whether one runner sampled both, this fragment after the other one."""
    (runner, _, seq), (other_runner, _, other_seq) = fragment.rpartition("/"), other.rpartition("/")
    return runner == other_runner and int(seq) > int(other_seq)


def _check_accepted(history: History, reports: list[Event], copies: _Copies) -> tuple[int, int, int]:
    """Check that everything accepted is reported, still held, or gone with all its copies."""
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
        accepted: dict[str, int] = {event["id"]: event["steps"] for event in _of(events, "accepted")}
        num_accepted += len(accepted)
        for fragment, num_steps in accepted.items():
            if fragment in reported:
                if reported[fragment] != num_steps:
                    raise HistoryError(
                        f"fragment {fragment} of {num_steps} steps was reported with {reported[fragment]}"
                    )
            elif copies.are_gone(fragment, process):
                num_gone += copies.num_trained[fragment] < num_steps  # else only its report is lost
            else:
                num_pending += 1
    return num_accepted, num_pending, num_gone


def check_weights(history: History) -> None:
    """Check that each runner's weights only get newer."""
    for (place, pid), events in history.items():
        orders = [(e["generation"], e["version"]) for e in _of(events, "weights")]
        for before, after in itertools.pairwise(orders):
            if after <= before:
                raise HistoryError(f"{place} (pid {pid}) loaded weights {after} after {before}")
