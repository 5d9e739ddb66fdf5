"""What happened in a run, and the checker that judges it (Jepsen's way: record, then prove)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import FragmentRange


class Step(NamedTuple):
    """One optimizer step: part of the chain that made a learner's parameters."""

    update_id: int
    generation: int
    attempt: int
    ranges: tuple[FragmentRange, ...]
    num_replayed: int = 0
    num_ranks: int = 1

    @property
    def num_steps(self) -> int:
        return sum(item.num_steps for item in self.ranges)


class HistoryError(AssertionError):
    """A promise was broken."""


@dataclass
class History:
    """Facts, in the order they happened; `check` raises HistoryError for the first broken promise."""

    staleness: int
    batch: int
    max_lag: int = -1
    train_ratio: float = 0.0
    warm_up: int = 0
    env_steps: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    rank_of: dict[tuple[int, str, int], int] = field(default_factory=dict)
    sent: set[FragmentId] = field(default_factory=set)
    fragment_versions: dict[FragmentId, int] = field(default_factory=dict)
    fragment_sizes: dict[FragmentId, int] = field(default_factory=dict)
    reports: list[Any] = field(default_factory=list)
    quarantined: list[FragmentId] = field(default_factory=list)
    chain: list[Step] = field(default_factory=list)
    finished: bool = False
    rollbacks: int = 0
    num_faults: int = 0
    num_brokers: int = 0
    num_sampled: dict[str, int] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)

    # ------------------------------------------------------------------ recording

    def sampled(self, runner: str, env_steps: tuple[int, ...]) -> None:
        self.num_sampled[runner] = seq = self.num_sampled.get(runner, -1) + 1
        self.env_steps[runner, seq] = env_steps

    def got(self, generation: int, rank: int, shards: Sequence[FragmentRange]) -> None:
        """With replay, an environment's steps go to one rank as long as the group is the same."""
        if not self.train_ratio:
            return
        for fragment, first, num_steps in shards:
            env_steps = self.env_steps[fragment.runner, fragment.seq]
            begin = 0
            for env_index, count in enumerate(env_steps):
                if max(begin, first) < min(begin + count, first + num_steps):
                    known = self.rank_of.setdefault((generation, fragment.runner, env_index), rank)
                    if known != rank:
                        raise HistoryError(f"{fragment}, environment {env_index}: ranks {known} and {rank}")
                begin += count

    def observe_broker(self, broker: Any) -> None:
        """Cheap facts after every event of the broker."""
        state, ledger = broker.state, broker.state.ledger
        entries = ledger.entries.values()
        assert ledger.accounting.pending == sum(entry.num_steps - entry.done for entry in entries)
        assert ledger.free_steps() == sum(entry.free for entry in entries)
        assert ledger.num_bytes == sum(entry.num_bytes for entry in entries)
        for key, record in ledger.runners.items():
            held = [entry.num_bytes for entry in entries if entry.id[:2] == key]
            assert (record.num_uncommitted, record.uncommitted_bytes) == (len(held), sum(held))
        for version in {entry.version for entry in entries}:
            free = [entry.free for entry in entries if entry.version == version]
            assert ledger.free_steps(version, version) == sum(free)
        assert state.leases.leased_env_steps() >= 0, "negative credits"
        for fragment, entry in state.ledger.entries.items():
            self.fragment_versions[fragment] = entry.version
            self.fragment_sizes[fragment] = entry.size

    def finish(self, *, finished: bool, chain: list[Step], broker: Any, num_reports: int) -> None:
        self.finished = finished
        self.chain = list(chain)
        if broker is not None:
            accounting = broker.state.ledger.accounting
            self.final = {
                "trained": accounting.trained,
                "skipped": accounting.dropped.get("skipped", 0),
                "num_reports": num_reports,
                # A broker that replaced another may not have met the driver when the run ended.
                "is_current": broker.state.next_commit == num_reports,
            }

    # ------------------------------------------------------------------ judging

    def check(self) -> None:
        """Raises HistoryError for the first promise that does not hold."""
        self._check_progress()
        self._check_chain()
        self._check_reports()
        self._check_accounting()

    def _check_progress(self) -> None:
        if not self.finished:
            raise HistoryError("no progress: the run did not finish after the faults had stopped")

    def _check_chain(self) -> None:
        """Every update once, in order, its whole batch; no step of a fragment trained twice."""
        trained: dict[FragmentId, list[tuple[int, int]]] = {}
        num_fresh = 0
        for position, step in enumerate(self.chain):
            if step.update_id != position:
                raise HistoryError(f"update {step.update_id} stands at {position} in the lineage")
            num_steps = step.num_steps
            num_fresh += num_steps
            if num_steps < self.batch or (self.staleness and num_steps != self.batch):
                raise HistoryError(f"update {position} trained {num_steps} steps, its batch is {self.batch}")
            for fragment, first, count in step.ranges:
                if fragment not in self.sent:
                    raise HistoryError(f"{fragment} was trained, but no runner sent it")
                if first + count > self.fragment_sizes.get(fragment, first + count):
                    raise HistoryError(f"{fragment}: steps beyond its end were trained")
                for other_first, other_count in trained.get(fragment, []):
                    if first < other_first + other_count and other_first < first + count:
                        raise HistoryError(f"{fragment}: steps {first}… trained twice in one lineage")
                trained.setdefault(fragment, []).append((first, count))
                version = self.fragment_versions.get(fragment, position)
                if 0 <= self.max_lag < position - version and not self.rollbacks:
                    raise HistoryError(
                        f"{fragment}: {position - version} versions old in update {position}, {self.max_lag} allowed"
                    )
                if version > position and not self.rollbacks:
                    raise HistoryError(f"{fragment} of version {version} was trained before it existed")

            if self.train_ratio:
                due = self.train_ratio * max(0, num_fresh - self.warm_up)
                if not -1e-6 <= due - step.num_replayed < 8 * step.num_ranks:
                    raise HistoryError(
                        f"update {position}: {step.num_replayed} steps replayed, {due} are due"
                    )

    def _check_reports(self) -> None:
        """Every update reported once and in order (a rollback starts again from its checkpoint)."""
        expected = 0
        for report in self.reports:
            update_id = report.report.update_id
            if update_id != expected and not (self.rollbacks and update_id < expected):
                raise HistoryError(f"update {update_id} was reported when {expected} was due")
            num_steps = report.report.num_env_steps
            if num_steps < self.batch or (self.staleness and num_steps != self.batch):
                raise HistoryError(
                    f"update {update_id} was reported with {num_steps} steps, its batch is {self.batch}"
                )
            expected = update_id + 1
        seen: set[FragmentId] = set()
        for report in self.reports:
            for fragment, _, _ in report.fragments:
                if fragment in seen and self.num_brokers == 1:
                    raise HistoryError(f"{fragment} was reported twice")
                seen.add(fragment)

    def _check_accounting(self) -> None:
        final = self.final
        if not final:
            return
        if final["skipped"]:
            raise HistoryError(f"steps lie between what was trained and what came before it: {final}")
        num_steps = sum(step.num_steps for step in self.chain[: final["num_reports"]])
        if final["is_current"] and not self.rollbacks and final["trained"] != num_steps:
            raise HistoryError(
                f"{final['num_reports']} updates of {num_steps} steps were reported, "
                f"{final['trained']} steps counted as trained"
            )
