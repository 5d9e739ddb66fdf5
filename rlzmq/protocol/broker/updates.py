"""Updates: a batch is planned, delivered, trained once, committed in order, and reported to the driver.

```
 open ─► collected ─► planned: SHARD_PLAN, SHARD… ─► all ranks READY ─► TRAIN ─► all DONE ─► committed
                          ▲                                               │
                          └──── a rank died, or refused a fragment ◄──────┘ (a new attempt)
```

Ranks get equal shares of a batch, or, if episodes are kept together, all steps of certain environments: an episode
belongs to one environment, so it stays with one rank.

An update that a rank has trained, or was told to train, is kept, even if an earlier broker planned it. All other
updates are released and planned again for the current group.

Steps too old to be trained are dropped, with a counted reason: "surplus" is what arrives after its on-policy batch is
complete (`_drop_surplus`), "stale" what is older than `max_policy_lag` (`_plan_next`).

A committed update is reported once, and the report repeated until it is confirmed. It carries the metas of fragments
that ended since the last one, and their runners' watermarks. Once the driver has it, runners may forget those
fragments, and learners the update.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

from rlzmq.core.patience import FACTOR, STEP_S
from rlzmq.protocol.broker.state import BrokerState, KeptReport, OpenedUpdate, Peer, Plan, PublishedState
from rlzmq.protocol.core import Quarantine, Received
from rlzmq.protocol.ledger import DropReason, Entry, Ledger
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.messages import (
    CommitReport,
    DriverState,
    Hello,
    LearnerState,
    OpenUpdate,
    Progress,
    Reset,
    Shard,
    ShardPlan,
    ShardReady,
    ShardRefused,
    Train,
    UpdateCommitted,
    UpdateDone,
)
from rlzmq.wire.payloads import FragmentRange, join_frames, pack_ranges, slice_fragment, unpack_ranges

__all__ = [
    "Updates",
    "progress_of",
    "rank_of_env",
    "rank_shares",
    "shards_by_env",
    "take_shards",
    "take_steps",
]


_NUMBER = re.compile(r"(\d+)(?:@.*)?$")


def rank_shares(num_env_steps: int, num_ranks: int) -> list[int]:
    """Return each rank's share of a batch, as equal as integers allow. The first ranks get the remainder.

    Shares are equal for the number of ranks that the batch was configured for. After the loss of a rank they may
    differ by one step.
    """
    base, extra = divmod(num_env_steps, num_ranks)
    return [base + (rank < extra) for rank in range(num_ranks)]


def take_shards(ledger: Ledger, entries: Sequence[Entry], shares: Sequence[int]) -> list[list[FragmentRange]]:
    """Take exactly ``shares[rank]`` steps for every rank, from the entries in the given order.

    A fragment that straddles two ranks goes to both, with different ranges. The rest of the last one remains free.

    Returns:
        One list of ranges per rank; together they are contiguous in the order of `entries`.
    """
    assert sum(entry.free for entry in entries) >= sum(shares), "fewer free steps than the batch needs"
    shards: list[list[FragmentRange]] = []
    remaining = iter(entries)
    entry = next(remaining, None)
    for share in shares:
        shard: list[FragmentRange] = []
        while share:
            while entry is not None and not entry.free:
                entry = next(remaining, None)
            assert entry is not None
            taken = ledger.take(entry, min(share, entry.free))
            shard.append(taken)
            share -= taken.num_steps
        shards.append(shard)
    return shards


def take_steps(ledger: Ledger, entries: Sequence[Entry], num_env_steps: int) -> list[FragmentRange]:
    """Take exactly `num_env_steps` steps, from the entries in the given order."""
    (ranges,) = take_shards(ledger, entries, [num_env_steps])
    return ranges


def rank_of_env(runner_name: str, env_index: int, num_envs: int, num_ranks: int) -> int:
    """Return the rank that gets an environment's steps.

    The result depends only on the arguments, so it survives a restart of the broker. A runner's environments are
    assigned to ranks in blocks, and each runner begins with a different rank, so ranks get similar amounts. With
    fewer environments than ranks, some ranks get nothing.

    Args:
        runner_name: Name such as ``runner-3``; a name without a number is hashed.
        env_index, num_envs: Index of the environment, and the runner's number of environments, >= 1.
        num_ranks: Number of learner ranks.
    """
    number = _NUMBER.search(runner_name)
    runner = int(number[1]) if number is not None else zlib.crc32(runner_name.encode())
    return (runner + env_index * num_ranks // num_envs) % num_ranks


def shards_by_env(
    ledger: Ledger, ranges: Sequence[FragmentRange], num_ranks: int
) -> list[list[FragmentRange]]:
    """Split an update's ranges by the ranks of their environments.

    A fragment without env step counts per environment goes as a whole to the rank of its runner's first environment.

    Returns:
        One list of ranges per rank, in the order of `ranges`; a rank may get none.
    """
    shards: list[list[FragmentRange]] = [[] for _ in range(num_ranks)]
    for fragment, first, num_steps in ranges:
        entry = ledger.entries[fragment]
        env_steps = entry.env_steps or (entry.size,)
        begin, end = 0, 0
        for env_index, count in enumerate(env_steps):
            end += count
            rank = rank_of_env(entry.runner_name, env_index, len(env_steps), num_ranks)
            following = env_index + 1
            if following < len(env_steps) and rank == rank_of_env(
                entry.runner_name, following, len(env_steps), num_ranks
            ):
                continue
            low, high = max(begin, first), min(end, first + num_steps)
            if low < high:
                shards[rank].append(FragmentRange(fragment, low, high - low))
            begin = end
    return shards


class Updates:
    """All updates, from the driver's request to the confirmation of their report.

    `progress` does whatever has become possible. What a rank lacks, according to its heartbeat, is sent again. The
    updates in flight are kept consistent with what the learners remember.
    """

    def __init__(self, state: BrokerState, store: PublishedState) -> None:
        self._state = state
        self._store = store

    # ------------------------------------------------------------------ the driver

    def driver_joined(self, hello: Hello, watermarks: list[FragmentRange], now: float) -> None:
        """Adopt the lineage and the reported updates of a driver that registered.

        Updates of which it has reports, beyond this broker's commits, were committed by an earlier broker.

        Args:
            hello: The driver's HELLO.
            watermarks: The first unreported fragment of each runner.
            now: Current time in seconds.
        """
        state, next_report = self._state, hello.next_update
        if state.next_commit is None or next_report > state.next_commit:
            state.next_commit = next_report
            state.min_generation = max(state.min_generation, hello.generation)
            self._take_over(hello)
            for update_id in [u for u in state.plans if u < next_report]:
                state.ledger.note_trained(state.plans.pop(update_id).ranges)
            for update_id in [u for u in state.open if u < next_report]:
                del state.open[update_id]
            for entry in [e for e in state.ledger.entries.values() if e.generation < hello.generation]:
                state.drop(entry, "rolled_back")
        self._driver_has(next_report)
        for report in state.reports.values():
            self._send_report(report, now)
        state.ledger.disown_below(
            [fragment for fragment, _, _ in watermarks]
        )  # reported by an earlier broker
        for fragment, _, _ in watermarks:
            state.receipts.let_go_below(fragment)
        if state.driver is not None:
            state.send(state.driver, progress_of(state))

    def _take_over(self, hello: Hello) -> None:
        """Add the driver's counts, without those already counted here."""
        accounting = self._state.ledger.accounting
        trained = max(0, hello.trained - accounting.trained)
        dropped = {
            reason: max(0, count - accounting.dropped.get(reason, 0))
            for reason, count in hello.dropped.items()
        }
        accounting.add(sampled=trained + sum(dropped.values()), trained=trained, dropped=dropped)

    def on_driver_state(self, peer: Peer, message: DriverState, event: Received, now: float) -> None:
        """Handle the driver's heartbeat: the reports that it has, and its verdict on the run."""
        self._state.bottleneck = message.bottleneck
        if message.min_generation == self._state.min_generation:
            self._driver_has(message.next_report)

    def on_open_update(self, peer: Peer, update: OpenUpdate, event: Received, now: float) -> None:
        """Open an update. Repeated requests are ignored."""
        state = self._state
        if update.min_generation != state.min_generation:
            return
        if state.next_commit is None or update.update_id < state.next_commit:
            return
        state.open.setdefault(update.update_id, OpenedUpdate(update, now))
        state.terms = state.open[max(state.open)].terms

    def on_reset(self, peer: Peer, message: Reset, event: Received, now: float) -> None:
        """Begin a new lineage. Fragments of the old one are dropped."""
        state = self._state
        if message.generation <= state.min_generation:
            return
        state.min_generation = message.generation
        state.to_report = [(fragment, size, b"") for fragment, size, _ in state.to_report]
        if state.generation < message.generation:
            state.ranks.clear()
            state.generation = -1
        self._release()
        for entry in list(state.ledger.entries.values()):
            if entry.generation < message.generation:
                state.drop(entry, "rolled_back")
        for lease_id in list(state.leases.leases):
            state.leases.end(lease_id)
        if state.weights is not None and state.weights.generation < message.generation:
            state.weights = None
        state.open.clear()
        self._give_up_reports()
        state.unpublished.clear()
        state.terms = None
        state.next_commit = message.next_update

    # ------------------------------------------------------------------ ranks

    def learner_joined(
        self, peer: Peer, trained: list[FragmentRange], training: list[list[FragmentRange]]
    ) -> None:
        """Adopt the updates that a registering rank has trained or was told to train."""
        hello = peer.hello
        self._note_trained(trained)
        for update_id, attempt, ranges in zip(
            hello.training_updates, hello.training_attempts, training, strict=True
        ):
            self._adopt(update_id, attempt, ranges)
        self._state.group_next_update = None  # recomputed once the group is complete

    def on_ready(self, peer: Peer, message: ShardReady, event: Received, now: float) -> None:
        """Record that a rank has decoded its shard; send TRAIN once all have."""
        plan = self._state.plan_of(message.update_id, message.attempt)
        if plan is None or (message.generation, message.rank) != (plan.generation, peer.hello.rank):
            return
        plan.ready.add(message.rank)
        if plan.is_training:
            self._send_train(plan, message.rank)  # its TRAIN was lost
        else:
            self._train_ready(now)

    def on_learner_state(self, peer: Peer, message: LearnerState, now: float) -> None:
        """Send again the messages that a rank lacks and should have received by now."""
        state, rank = self._state, peer.hello.rank
        if message.generation != state.generation:
            return
        peer.next_update = max(peer.next_update, message.next_update)
        held = {
            update_id: (attempt, num_held, phase)
            for update_id, attempt, num_held, phase in zip(
                message.update_ids, message.attempts, message.num_held, message.phases, strict=False
            )
        }
        for plan in state.plans.values():
            if not plan.shards or plan.update_id < message.next_update:
                continue
            if now - plan.sent_at.get(rank, now) < state.options.resend_s:
                continue
            attempt, num, phase = held.get(plan.update_id, (-1, -1, 0))
            plan.sent_at[rank] = now
            if plan.is_training:
                if attempt != plan.attempt or phase < 2:
                    self._send_train(plan, rank)
            elif attempt != plan.attempt or num < len(plan.shards[rank]) or rank not in plan.ready:
                self._send_shard(plan, rank)

    def on_shard_refused(self, peer: Peer, message: ShardRefused, event: Received, now: float) -> None:
        """Drop a fragment that a rank cannot use, and plan the update again."""
        state = self._state
        plan = state.plan_of(message.update_id, message.attempt)
        if plan is None or plan.is_training:
            return
        entry = state.ledger.entries.get(message.fragment)
        if entry is None or all(item.fragment != message.fragment for item in plan.ranges):
            return
        self._release(message.update_id)
        detail = f"{message.fragment}: {message.reason}: {message.detail}"
        self._set_aside(entry.id, "bad_fragment", detail)
        state.drop(entry, "rejected")

    def on_update_done(self, peer: Peer, message: UpdateDone, event: Received, now: float) -> None:
        """Record that a rank has trained (or skipped) an update."""
        state = self._state
        ranges = unpack_ranges(event.payload[1:3])
        if state.next_commit is not None and message.update_id < state.next_commit:
            self._note_trained(ranges)
            if message.update_id not in state.reports:
                self._confirm(peer, message.update_id)
            return
        if message.generation != state.generation:
            return
        self._adopt(message.update_id, message.attempt, ranges)
        plan = state.plan_of(message.update_id, message.attempt)
        if plan is None:
            return
        plan.done_by.add(peer.uuid)
        plan.results[message.rank] = event.payload[0] if event.payload else b""
        plan.trained = message.trained
        plan.num_trained_steps = message.num_trained_steps
        peer.next_update = max(peer.next_update, message.update_id + 1)

    # ------------------------------------------------------------------ progress

    def progress(self, now: float) -> None:
        """Commit trained updates, drop stale data, and plan updates whose batch is complete."""
        if self._state.group_is_complete and self._state.group_next_update is None:
            self._on_group_complete()
        while self._commit_next(now):
            pass
        while self._plan_next(now):
            pass

    def _commit_next(self, now: float) -> bool:
        state = self._state
        update_id = state.next_commit
        if update_id is None or state.driver is None:
            return False
        plan, opened = state.plans.get(update_id), state.open.get(update_id)
        if plan is None or opened is None:
            return False
        # Not before they have sent their results, even if a HELLO says that they have trained it.
        if not (state.group_is_complete and all(peer.uuid in plan.done_by for peer in state.ranks.values())):
            return False
        assert state.started_at is not None
        if now < state.started_at + state.options.resend_s:
            expected = [item for item in plan.ranges if item.fragment.runner not in state.fenced]
            if state.ledger.missing(expected):
                return False
        self._commit(plan, opened, now)
        return True

    def _commit(self, plan: Plan, opened: OpenedUpdate, now: float) -> None:
        state, ledger, update = self._state, self._state.ledger, opened.terms
        entries = [ledger.entries[item.fragment] for item in plan.ranges if item.fragment in ledger.entries]
        for entry in entries:
            state.to_be_reported(entry)
        version_steps: Counter[int] = Counter()
        for item in plan.ranges:
            if (known := ledger.entries.get(item.fragment)) is not None:
                version_steps[known.version] += item.num_steps
        num_kept = ledger.commit(plan.ranges, is_skipped=not plan.trained)
        del state.plans[plan.update_id]
        del state.open[plan.update_id]
        state.next_commit = plan.update_id + 1
        if state.committed_at is not None:
            state.commit_pace.note(plan.num_steps, now - state.committed_at)
        state.committed_at = now
        state.unpublished[plan.update_id] = plan.num_steps
        self._store.release_published()
        self._drop_surplus(update, update.weights_version + 1)
        self._report(plan, opened, num_kept, version_steps, now)

    # ------------------------------------------------------------------ planning

    def _plan_next(self, now: float) -> bool:
        state = self._state
        update_id = state.next_plan
        update = state.terms_of(update_id) if update_id is not None else None
        if update_id is None or update is None or state.group_next_update is None:
            return False
        if not state.group_is_complete or update_id < state.group_next_update:
            return False
        # The next update may be delivered while one is trained; on-policy, its data cannot exist yet.
        if len(state.plans) >= (1 if update.staleness == 0 else 2):
            return False
        oldest, newest = state.version_bounds(update)
        self._drop_older(oldest, "surplus" if update.staleness == 0 else "stale")
        batch, num_free = state.batch_of(update), state.ledger.free_steps(oldest, newest)
        if num_free < batch:
            return False
        if update.staleness == 0:
            batch = num_free  # what was sampled beyond the batch would be of no use to a later one
        entries = [
            entry for entry in state.ledger.free_entries() if newest is None or entry.version <= newest
        ]
        if update.staleness == 0:
            # The assignment to ranks must not depend on the order of arrival.
            entries.sort(key=lambda entry: (entry.runner_name, entry.id))
        if update.keeps_episodes:
            ranges = take_steps(state.ledger, entries, batch)
            shards = shards_by_env(state.ledger, ranges, state.num_ranks)
        else:
            shards = take_shards(state.ledger, entries, rank_shares(batch, state.num_ranks))
            ranges = [item for shard in shards for item in shard]
        plan = Plan(
            update_id=update_id,
            attempt=next(state.attempts),
            generation=state.generation,
            num_ranks=state.num_ranks,
            shards=shards,
            ranges=ranges,
            rank_uuids=[state.ranks[rank].uuid for rank in range(state.num_ranks)],
            planned_at=now,
        )
        state.plans[update_id] = plan
        for rank in range(plan.num_ranks):
            plan.sent_at[rank] = now
            self._send_shard(plan, rank)
        return True

    def _drop_surplus(self, update: OpenUpdate, version: int) -> None:
        """Drop what arrived after its on-policy batch was complete: a lease's steps that others had sampled again."""
        if update.staleness == 0 and update.max_policy_lag >= 0:
            self._drop_older(version, "surplus")

    def _drop_older(self, version: int, reason: DropReason) -> None:
        ledger = self._state.ledger
        if ledger.free_steps(max_version=version - 1):
            for entry in ledger.free_entries():
                if entry.version < version:
                    self._state.drop(entry, reason)

    # ------------------------------------------------------------------ delivery

    def _train_ready(self, now: float) -> None:
        """Send TRAIN in the order of updates: while an update may be replanned, so may the next one."""
        for _, plan in sorted(self._state.plans.items()):
            if not plan.is_training:
                if len(plan.ready) < plan.num_ranks:
                    return
                plan.is_training = True
                for rank in range(plan.num_ranks):
                    plan.sent_at[rank] = now
                    self._send_train(plan, rank)

    def _send_shard(self, plan: Plan, rank: int) -> None:
        state, peer = self._state, self._state.ranks.get(rank)
        if peer is None:
            return
        shard = plan.shards[rank]
        numbers = state.options.incarnation, plan.update_id, plan.attempt, plan.generation
        rank_steps = sum(item.num_steps for item in shard)
        state.send(peer, ShardPlan(*numbers, len(shard), rank_steps, plan.num_steps))
        for index, (fragment, first, num_steps) in enumerate(shard):
            message = Shard(*numbers, index, fragment, first, num_steps)
            entry = state.ledger.entries[fragment]
            is_whole = num_steps == entry.size
            frames = entry.frames if is_whole else slice_fragment(entry.frames, first, num_steps)
            state.send(peer, message, tuple(frames))

    def _send_train(self, plan: Plan, rank: int) -> None:
        peer = self._state.ranks.get(rank)
        if peer is not None:
            message = Train(self._state.options.incarnation, plan.update_id, plan.attempt, plan.generation)
            self._state.send(peer, message, tuple(pack_ranges(plan.ranges)))

    # ------------------------------------------------------------------ reports

    def _report(
        self, plan: Plan, opened: OpenedUpdate, num_kept: int, version_steps: Mapping[int, int], now: float
    ) -> None:
        """Make and send the report of a committed update.

        Args:
            plan, opened: Plan and request of the update.
            num_kept: Change in the account's number of trained env steps.
            version_steps: Number of trained env steps by weights version, of fragments that are known here.
            now: Time of the commit.
        """
        state = self._state
        accounting = state.ledger.accounting
        planned_at = now if plan.planned_at is None else plan.planned_at
        report = CommitReport(
            broker_incarnation=state.options.incarnation,
            min_generation=state.min_generation,
            update_id=plan.update_id,
            generation=plan.generation,
            num_env_steps=plan.num_steps,
            num_kept_steps=num_kept,
            num_trained_steps=plan.num_trained_steps,
            trained=accounting.trained,
            dropped=dict(accounting.dropped),
            versions=tuple(sorted(version_steps)),
            version_steps=tuple(version_steps[version] for version in sorted(version_steps)),
            sampling_s=planned_at - opened.at,
            training_s=now - planned_at,
        )
        reported, state.to_report = state.to_report, []
        payload = (
            *pack_ranges(FragmentRange(fragment, 0, size) for fragment, size, _ in reported),
            join_frames(meta for _, _, meta in reported),
            join_frames(plan.results[rank] for rank in sorted(plan.results)),
            *pack_ranges(state.ledger.take_watermarks()),
        )
        state.take_committed()
        committed, state.committed = state.committed, []
        kept = state.reports[plan.update_id] = KeptReport(report, payload, now, committed)
        self._send_report(kept, now)

    def send_reports_again(self, now: float) -> None:
        """Repeat the reports that were not confirmed in time."""
        for report in self._state.reports.values():
            if now - report.sent_at >= self._state.options.resend_s:
                self._send_report(report, now)

    def _driver_has(self, next_report: int) -> None:
        """Discard reports below `next_report`, and let learners forget those updates."""
        state = self._state
        confirmed = [update_id for update_id in state.reports if update_id < next_report]
        for update_id in confirmed:
            self._let_go(state.reports.pop(update_id))
            for peer in state.ranks.values():
                self._confirm(peer, update_id)
        if confirmed and state.group_is_complete:
            state.forgetters.clear()

    def _give_up_reports(self) -> None:
        """Discard all reports after the driver has returned to a checkpoint."""
        state = self._state
        for report in state.reports.values():
            self._let_go(report)
        state.reports.clear()
        state.ledger.tell_again()

    def _confirm(self, peer: Peer, update_id: int) -> None:
        """Send UPDATE_COMMITTED to a rank, with the fragments that runners have forgotten and it may forget."""
        state = self._state
        forgotten = pack_ranges(
            FragmentRange(FragmentId(runner.uuid, runner.incarnation, runner.first_unacked), 0, 0)
            for uuid in state.forgetters
            if (runner := state.runners.get(uuid)) is not None
        )
        state.send(peer, UpdateCommitted(update_id, state.generation), tuple(forgotten))

    def _send_report(self, report: KeptReport, now: float) -> None:
        if self._state.driver is not None:
            report.sent_at = now
            self._state.send(self._state.driver, report.message, report.payload)

    def _let_go(self, report: KeptReport) -> None:
        for fragment in report.fragments:
            self._state.receipts.let_go(fragment)

    # ------------------------------------------------------------------ learners' memory

    def _note_trained(self, ranges: list[FragmentRange]) -> None:
        """Mark ranges that a learner has trained as done, and release plans that contain them."""
        state = self._state
        for fragment, first, num_steps in ranges:
            entry = state.ledger.entries.get(fragment)
            if entry is not None and first + num_steps >= entry.num_steps:
                state.to_be_reported(entry)  # an earlier broker may have died before its report
        state.ledger.note_trained(ranges)
        for plan in sorted(state.plans.values(), key=lambda plan: plan.update_id):
            if not plan.is_training and any(self._is_done(item) for item in plan.ranges):
                self._release(plan.update_id)
                return

    def _adopt(self, update_id: int, attempt: int, ranges: list[FragmentRange]) -> None:
        """Adopt an update that learners train or have trained under another broker's plan."""
        state = self._state
        if state.next_commit is not None and update_id < state.next_commit:
            return
        plan = state.plans.get(update_id)
        if plan is not None:
            if plan.attempt == attempt:
                plan.is_training = True
                return
            if plan.is_training:
                return
            self._release(update_id)
        state.ledger.reserve(ranges)
        state.plans[update_id] = Plan(
            update_id=update_id,
            attempt=attempt,
            generation=state.generation,
            num_ranks=state.num_ranks,
            shards=[],
            ranges=ranges,
            rank_uuids=[],
            is_training=True,
        )

    def _on_group_complete(self) -> None:
        """Release updates that no rank of the complete group trains or has trained, to be planned again.

        The ranks of a newly formed group agree on the next update. When a restarted broker meets a running group,
        some ranks may be one update ahead of others that are about to finish it.
        """
        state = self._state
        updates = [peer.next_update for peer in state.ranks.values()]
        if state.next_commit is not None and max(updates) < state.next_commit:
            return  # the group restored a checkpoint, and the driver's RESET will follow
        if max(peer.hello.lineage for peer in state.ranks.values()) > state.min_generation:
            return  # the same, at exactly the due update; held fragments may have been trained already
        begun = due = state.group_next_update = max(updates)
        # Updates run in order, so none can have begun after one without TRAIN.
        while begun in state.plans and state.plans[begun].is_training:
            begun += 1
        for plan in sorted(state.plans.values(), key=lambda plan: -plan.update_id):
            is_same = plan.generation == state.generation
            if plan.is_training and plan.update_id < due:
                plan.generation = state.generation
            elif not is_same or plan.update_id < due or (plan.is_training and plan.update_id > begun):
                if not is_same:
                    self._blame_deaths(plan)
                self._release(plan.update_id)

    def _blame_deaths(self, plan: Plan) -> None:
        """Count a rank's death against the fragments that it was training, and quarantine those above the limit."""
        state = self._state
        if not plan.is_training or plan.update_id != state.next_commit:
            return
        alive = {peer.uuid for peer in state.ranks.values()}
        dead = [rank for rank, uuid in enumerate(plan.rank_uuids) if uuid not in alive]
        blamed = [item for rank in dead for item in plan.shards[rank]] if plan.shards else plan.ranges
        self._release(plan.update_id)
        for fragment in dict.fromkeys(item.fragment for item in blamed):
            entry = state.ledger.entries.get(fragment)
            if entry is None:
                continue
            entry.deaths += 1
            if entry.deaths >= state.options.death_limit:
                detail = f"{fragment}: {entry.deaths} learners died with it"
                self._set_aside(entry.id, "quarantined", detail)
                state.drop(entry, "quarantined")

    def _set_aside(self, fragment: FragmentId, event: str, detail: str) -> None:
        """Quarantine an unusable fragment if it is still held, count it against its runner, and notify the driver."""
        state = self._state
        entry, peer = state.ledger.entries.get(fragment), state.runners.get(fragment.runner)
        if entry is not None:
            state.out.append(Quarantine(entry.id, detail, entry.frames))
        if peer is not None:
            state.count_bad(peer, detail)
        name = entry.runner_name if entry is not None else peer.hello.name if peer is not None else ""
        state.notify(event, "runner", name, detail)

    def _release(self, from_update: int = -1) -> None:
        """Release the steps of updates from `from_update` on. Earlier updates keep theirs."""
        state = self._state
        for update_id in [u for u in state.plans if u >= from_update]:
            state.ledger.release(state.plans.pop(update_id).ranges)
        for plan in state.plans.values():
            state.ledger.reserve(plan.ranges)

    def _is_done(self, item: FragmentRange) -> bool:
        entry = self._state.ledger.entries.get(item.fragment)
        return entry is None or entry.done > item.first


def progress_of(state: BrokerState) -> Progress:
    """Return what the broker has of the driver, and whether it moves."""
    next_open = state.next_commit or 0
    while next_open in state.open:
        next_open += 1
    return Progress(
        next_open,
        state.connector_version,
        state.min_generation,
        num_moves=state.num_moves,
        patience_s=_patience_s(state),
    )


def _patience_s(state: BrokerState) -> float:
    """Return how long a peer that works on the next update may make no progress."""
    if state.next_commit in state.plans:
        return max((peer.pace_s for peer in state.ranks.values()), default=0.0)
    at_work = (peer for peer in state.runners.values() if state.leases.num_of_peer(peer.uuid))
    return max((max(STEP_S, FACTOR * peer.pace_s) for peer in at_work), default=0.0)
