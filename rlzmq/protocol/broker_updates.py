"""The broker's updates: exact batches planned, delivered, trained once, committed in order.

```
 open ─► collected ─► planned: SHARD_PLAN, SHARD… ─► all ranks READY ─► TRAIN ─► all DONE ─► committed
                          ▲                                               │
                          └──── a rank died, or refused a fragment ◄──────┘ (a new attempt)
```
"""

from __future__ import annotations

from rlzmq.protocol.accounting import DropReason
from rlzmq.protocol.broker_state import BrokerState, KeptReport, OpenedUpdate, Peer, Run
from rlzmq.protocol.codec import Buffer
from rlzmq.protocol.events import Quarantine
from rlzmq.protocol.ledger import Entry
from rlzmq.protocol.messages import (
    Hello,
    LearnerState,
    OpenUpdate,
    Reset,
    Shard,
    ShardPlan,
    ShardReady,
    ShardRefused,
    Train,
    UpdateCommitted,
    UpdateDone,
    UpdateReport,
)
from rlzmq.protocol.ranges import FragmentRange, pack_blobs, pack_ranges
from rlzmq.protocol.schema import FragmentId
from rlzmq.protocol.sharding import rank_shares, take_shards

__all__ = ["Updates"]


class Updates:
    """See the module's head. `progress` does whatever has become possible."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    # ------------------------------------------------------------------ driver

    def open(self, update: OpenUpdate, now: float) -> None:
        """The driver asks for an update; one asked for before is ignored."""
        state = self._state
        if state.next_commit is None or update.update_id < state.next_commit:
            return
        state.open.setdefault(update.update_id, OpenedUpdate(update, now))
        if state.terms is None or update.update_id >= state.terms.update_id:
            state.terms = update

    def driver_joined(self, hello: Hello, now: float) -> None:
        """The driver says from where on it lacks reports, and which lineage it is in.

        What it has beyond this broker's own commits was committed and reported by an earlier one.
        """
        state, next_report = self._state, hello.next_update
        if state.next_commit is None or next_report > state.next_commit:
            state.next_commit = next_report
            state.min_generation = max(state.min_generation, hello.generation)
            self._take_over(hello)
            for update_id in [u for u in state.runs if u < next_report]:
                state.ledger.note_trained(state.runs.pop(update_id).ranges)
            for update_id in [u for u in state.open if u < next_report]:
                del state.open[update_id]
            for entry in [e for e in state.ledger.entries.values() if e.generation < hello.generation]:
                self.drop(entry, "rolled_back")
        self.driver_has(next_report)
        for report in state.reports.values():
            self._send_report(report, now)

    def _take_over(self, hello: Hello) -> None:
        """Counts on from the driver's accounts, less what was taken over or trained here already."""
        accounting = self._state.ledger.accounting
        dropped = {
            reason: max(0, count - accounting.dropped.get(reason, 0))
            for reason, count in hello.dropped.items()
        }
        before = accounting.sampled
        accounting.add_base(max(0, hello.trained - accounting.trained), dropped)
        self._state.sampled_before += accounting.sampled - before

    def driver_has(self, next_report: int) -> None:
        """Reports below are not needed any more, nor are the learners' memories of those updates."""
        state = self._state
        for update_id in [u for u in state.reports if u < next_report]:
            state.let_go(state.reports.pop(update_id))
            for peer in state.ranks.values():
                self._confirm(peer, update_id)

    def reset(self, message: Reset) -> None:
        """A new lineage: what was sampled for the old one is dropped."""
        state = self._state
        if message.generation <= state.min_generation:
            return
        state.min_generation = message.generation
        if state.generation < message.generation:
            state.ranks.clear()
            state.num_ranks = 0
            state.generation = -1
        state.group_next_update = None
        self._release_runs()
        for entry in list(state.ledger.entries.values()):
            if entry.generation < message.generation:
                self.drop(entry, "rolled_back")
        for lease_id in list(state.leases.leases):
            state.leases.end(lease_id)
        if state.weights is not None and state.weights.generation < message.generation:
            state.weights = None
        state.open.clear()
        for report in state.reports.values():
            state.let_go(report)
        state.reports.clear()
        state.ledger.tell_again()
        state.unpublished.clear()
        state.terms = None
        state.next_commit = message.next_update
        state.journal.begin_lineage(message.next_update)

    # ------------------------------------------------------------------ learners

    def learner_joined(
        self, peer: Peer, trained: list[FragmentRange], training: list[list[FragmentRange]]
    ) -> None:
        """A rank registered (again): believe what it trained and what it is told to train."""
        hello = peer.hello
        self._note_trained(trained)
        for update_id, attempt, ranges in zip(
            hello.training_updates, hello.training_attempts, training, strict=True
        ):
            self._adopt(update_id, attempt, ranges)
        self._state.group_next_update = None  # looked at again as soon as the group is complete

    def ready(self, message: ShardReady, now: float) -> None:
        """A rank has decoded its shard; when all have, they are told to train."""
        run = self._matching(message.update_id, message.attempt)
        if run is None or run.generation != message.generation:
            return
        run.ready.add(message.rank)
        if run.is_training:
            self._send_train(run, message.rank)  # its TRAIN was lost
        else:
            self._train_ready(now)

    def _train_ready(self, now: float) -> None:
        """TRAIN goes out in order of updates: as long as one may be planned anew, so may the next."""
        for _, run in sorted(self._state.runs.items()):
            if not run.is_training:
                if len(run.ready) < run.num_ranks:
                    return
                run.is_training = True
                for rank in range(run.num_ranks):
                    run.sent_at[rank] = now
                    self._send_train(run, rank)

    def refused(self, message: ShardRefused) -> None:
        """A rank cannot use a fragment: drop it and plan again."""
        state = self._state
        run = self._matching(message.update_id, message.attempt)
        if run is None or run.is_training:
            return
        entry = state.ledger.entries.get(message.fragment)
        if entry is None or all(item.fragment != message.fragment for item in run.ranges):
            return
        self._release_runs(message.update_id)
        detail = f"{message.fragment}: {message.reason}: {message.detail}"
        self._bad_fragment(entry, "bad_fragment", detail)
        self.drop(entry, "rejected")

    def done(self, peer: Peer, message: UpdateDone, results: Buffer, ranges: list[FragmentRange]) -> None:
        """A rank trained (or skipped) an update."""
        state = self._state
        if state.next_commit is not None and message.update_id < state.next_commit:
            self._note_trained(ranges)
            peer.next_update = max(peer.next_update, message.update_id + 1)
            if message.update_id not in state.reports:
                self._confirm(peer, message.update_id)
            return
        if message.generation != state.generation:
            return
        self._adopt(message.update_id, message.attempt, ranges)
        run = self._matching(message.update_id, message.attempt)
        if run is None:
            return
        run.results[message.rank] = results
        run.trained = message.trained
        run.num_trained_steps = max(run.num_trained_steps, message.num_trained_steps)
        peer.next_update = max(peer.next_update, message.update_id + 1)
        if len(run.results) >= run.num_ranks:
            run.is_settled = True

    def heartbeat(self, peer: Peer, message: LearnerState, now: float) -> None:
        """Sends again what a rank lacks and should have had by now."""
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
        for run in state.runs.values():
            if not run.shards or run.update_id < message.next_update:
                continue
            if now - run.sent_at.get(rank, now) < state.options.resend_s:
                continue
            attempt, num_held, phase = held.get(run.update_id, (-1, -1, 0))
            run.sent_at[rank] = now
            if run.is_training:
                if attempt != run.attempt or phase < 2:
                    self._send_train(run, rank)
            elif attempt != run.attempt or num_held < len(run.shards[rank]) or rank not in run.ready:
                self._send_shard(run, rank)

    # ------------------------------------------------------------------ progress

    def progress(self, now: float) -> None:
        """Commits what is trained, drops what is too old, plans what is covered."""
        if self._state.group_is_complete and self._state.group_next_update is None:
            self._on_group_complete()
        while self._commit_next(now):
            pass
        while self._plan_next(now):
            pass

    def drop(self, entry: Entry, reason: DropReason) -> None:
        """Drops an entry's free steps; its meta still reaches the driver."""
        self._state.to_be_reported(entry)
        self._state.journal.dropped(entry.id, reason)
        self._state.ledger.drop(entry, reason)

    def _commit_next(self, now: float) -> bool:
        state = self._state
        update_id = state.next_commit
        if update_id is None or state.driver is None:
            return False
        run, opened = state.runs.get(update_id), state.open.get(update_id)
        if run is None or opened is None:
            return False
        if not run.is_settled and not (
            run.is_training
            and state.group_is_complete
            and all(peer.next_update > update_id for peer in state.ranks.values())
        ):
            return False
        assert state.started_at is not None
        if now < state.started_at + state.options.recovery_grace_s and state.ledger.missing(run.ranges):
            return False
        self._commit(run, opened, now)
        return True

    def _commit(self, run: Run, opened: OpenedUpdate, now: float) -> None:
        state, ledger, update = self._state, self._state.ledger, opened.terms
        entries = [ledger.entries[item.fragment] for item in run.ranges if item.fragment in ledger.entries]
        for entry in entries:
            state.to_be_reported(entry)
        versions = [entry.version for entry in entries] or [update.weights_version]
        ledger.commit(run.ranges, trained=run.trained)
        state.journal.trained(run.update_id, run.ranges)
        del state.runs[run.update_id]
        del state.open[run.update_id]
        planned_at = now if run.planned_at is None else run.planned_at
        state.next_commit = run.update_id + 1
        num_steps = sum(item.num_steps for item in run.ranges)
        state.unpublished[run.update_id] = num_steps
        state.trained_steps += run.num_trained_steps
        self.release_published()
        if update.staleness == 0:
            # Whatever is left was sampled for this exact batch or before it.
            self._drop_older(update.weights_version + 1, "surplus")
        report = UpdateReport(
            broker_incarnation=state.options.incarnation,
            min_generation=state.min_generation,
            update_id=run.update_id,
            generation=run.generation,
            trained=run.trained,
            num_env_steps=num_steps,
            num_trained_steps=run.num_trained_steps,
            accounting=ledger.accounting.counts(),
            dropped=dict(ledger.accounting.dropped),
            oldest_version=min(versions),
            newest_version=max(versions),
            sampling_s=max(0.0, planned_at - opened.at),
            training_s=now - planned_at,
        )
        reported, state.to_report = state.to_report, []
        payload = (
            *pack_ranges(FragmentRange(fragment, 0, size) for fragment, size, _ in reported),
            *pack_blobs(meta for _, _, meta in reported),
            *pack_blobs(run.results[rank] for rank in sorted(run.results)),
            *pack_ranges(ledger.take_watermarks()),
        )
        state.take_committed()
        settled, state.settled = state.settled, []
        state.journal.reported(run.update_id)
        kept = state.reports[run.update_id] = KeptReport(report, payload, now, settled)
        self._send_report(kept, now)

    def release_published(self) -> None:
        """Slots whose weights are out are free again."""
        state = self._state
        if state.weights is not None:
            for update_id in [u for u in state.unpublished if u < state.weights.version]:
                del state.unpublished[update_id]

    def resend_reports(self, now: float) -> None:
        """Reports that the driver does not seem to have."""
        for report in self._state.reports.values():
            if now - report.sent_at >= self._state.options.resend_s:
                self._send_report(report, now)

    # ------------------------------------------------------------------ planning

    def _plan_next(self, now: float) -> bool:
        state = self._state
        update_id = state.next_plan
        update = state.terms_of(update_id) if update_id is not None else None
        if update_id is None or update is None or state.group_next_update is None:
            return False
        if not state.group_is_complete or update_id < state.group_next_update:
            return False
        # While an update trains, the next may be delivered; on-policy there is nothing to deliver.
        if len(state.runs) >= (1 if update.staleness == 0 else 2):
            return False
        oldest, newest = state.version_bounds(update)
        self._drop_older(oldest, "surplus" if update.staleness == 0 else "stale")
        batch = state.batch_of(update)
        if state.ledger.free_steps(oldest, newest) < batch:
            return False
        entries = [
            entry
            for entry in state.ledger.free_entries()
            if entry.version >= oldest and (newest is None or entry.version <= newest)
        ]
        if update.staleness == 0:
            # Which rank trains what shall not depend on who was first by a millisecond.
            entries.sort(key=lambda entry: (entry.runner_name, entry.id))
        shards = take_shards(state.ledger, entries, rank_shares(batch, state.num_ranks))
        run = Run(
            update_id=update_id,
            attempt=state.next_attempt,
            generation=state.generation,
            num_ranks=state.num_ranks,
            shards=shards,
            ranges=[item for shard in shards for item in shard],
            rank_uuids=[state.ranks[rank].uuid for rank in range(state.num_ranks)],
            planned_at=now,
        )
        state.next_attempt += 1
        state.runs[update_id] = run
        for rank in range(run.num_ranks):
            run.sent_at[rank] = now
            self._send_shard(run, rank)
        return True

    def _drop_older(self, version: int, reason: DropReason) -> None:
        ledger = self._state.ledger
        if ledger.free_steps(max_version=version - 1):
            for entry in ledger.free_entries():
                if entry.version < version:
                    self.drop(entry, reason)

    def _adopt(self, update_id: int, attempt: int, ranges: list[FragmentRange]) -> None:
        """An update that learners train or trained under a plan that this broker did not make."""
        state = self._state
        if state.next_commit is not None and update_id < state.next_commit:
            return
        run = state.runs.get(update_id)
        if run is not None:
            if run.attempt == attempt:
                run.is_training = True
                return
            if run.is_training:
                return
            self._release_runs(update_id)
        state.ledger.reserve(ranges)
        state.runs[update_id] = Run(
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
        """All ranks of a generation are here: what none of them trains or has trained is planned
        (again). In a group that just formed all agree; in one that a restarted broker meets, some
        ranks may be an update ahead of others that are about to finish it."""
        state = self._state
        updates = [peer.next_update for peer in state.ranks.values()]
        if state.next_commit is not None and max(updates) < state.next_commit:
            return  # they went back to a checkpoint: the driver's RESET is on its way
        if max(peer.hello.lineage for peer in state.ranks.values()) > state.min_generation:
            return  # so it is here, to the very update that is due; what is held may be trained already
        state.group_next_update = max(updates)
        # Updates run in order: behind one that nobody was told to train, nobody has begun.
        begun = max(updates)
        while begun in state.runs and state.runs[begun].is_training:
            begun += 1
        for run in sorted(state.runs.values(), key=lambda run: -run.update_id):
            is_same = run.generation == state.generation
            if run.is_training and run.update_id < max(updates):
                run.is_settled = run.is_settled or run.update_id < min(updates)
                run.generation = state.generation
            elif not is_same or run.update_id < max(updates) or (run.is_training and run.update_id > begun):
                if not is_same:
                    self._blame_deaths(run)
                self._release_runs(run.update_id)

    def _note_trained(self, ranges: list[FragmentRange]) -> None:
        """Believes a learner; a plan made before it said so may hold what is trained: made anew."""
        state = self._state
        for fragment, first, num_steps in ranges:
            entry = state.ledger.entries.get(fragment)
            if entry is not None and first + num_steps >= entry.num_steps:
                state.to_be_reported(entry)  # the broker that had it trained may have died before
        state.ledger.note_trained(ranges)
        for run in sorted(state.runs.values(), key=lambda run: run.update_id):
            if not run.is_training and any(self._is_done(item) for item in run.ranges):
                self._release_runs(run.update_id)
                return

    def _is_done(self, item: FragmentRange) -> bool:
        entry = self._state.ledger.entries.get(item.fragment)
        return entry is None or entry.done > item.first

    def _blame_deaths(self, run: Run) -> None:
        """Counts the death of a rank against the fragments it was training."""
        state = self._state
        if not run.is_training or run.update_id != state.next_commit:
            return
        alive = {peer.uuid for peer in state.ranks.values()}
        dead = [rank for rank, uuid in enumerate(run.rank_uuids) if uuid not in alive]
        blamed = [item for rank in dead for item in run.shards[rank]] if run.shards else run.ranges
        self._release_runs(run.update_id)
        for fragment in dict.fromkeys(item.fragment for item in blamed):
            entry = state.ledger.entries.get(fragment)
            if entry is None:
                continue
            entry.deaths += 1
            if entry.deaths >= state.options.death_limit:
                detail = f"{fragment}: {entry.deaths} learners died with it"
                self._bad_fragment(entry, "quarantined", detail)
                self.drop(entry, "quarantined")

    def _bad_fragment(self, entry: Entry, event: str, detail: str) -> None:
        state = self._state
        state.out.append(Quarantine(entry.id, detail, entry.frames))
        peer = state.runners.get(entry.id.runner)
        if peer is not None:
            peer.num_bad += 1
            peer.num_unusable += 1
        state.notify(event, "runner", entry.runner_name, detail)

    def _release_runs(self, from_update: int = -1) -> None:
        """Gives back what these updates have taken; those before them keep theirs."""
        state = self._state
        for update_id in [u for u in state.runs if u >= from_update]:
            state.ledger.release(state.runs.pop(update_id).ranges)
        for run in state.runs.values():
            state.ledger.reserve(run.ranges)

    # ------------------------------------------------------------------ sending

    def _matching(self, update_id: int, attempt: int) -> Run | None:
        run = self._state.runs.get(update_id)
        return run if run is not None and run.attempt == attempt else None

    def _send_shard(self, run: Run, rank: int) -> None:
        state, peer = self._state, self._state.ranks.get(rank)
        if peer is None:
            return
        shard = run.shards[rank]
        plan = ShardPlan(
            state.options.incarnation,
            run.update_id,
            run.attempt,
            run.generation,
            len(shard),
            sum(item.num_steps for item in shard),
            sum(item.num_steps for item in run.ranges),
        )
        state.send(peer, plan)
        for index, (fragment, first, num_steps) in enumerate(shard):
            message = Shard(
                state.options.incarnation,
                run.update_id,
                run.attempt,
                run.generation,
                index,
                fragment,
                first,
                num_steps,
            )
            state.send(peer, message, state.ledger.entries[fragment].frames)

    def _send_train(self, run: Run, rank: int) -> None:
        peer = self._state.ranks.get(rank)
        if peer is not None:
            num_steps = sum(item.num_steps for item in run.ranges)
            message = Train(
                self._state.options.incarnation, run.update_id, run.attempt, run.generation, num_steps
            )
            self._state.send(peer, message, tuple(pack_ranges(run.ranges)))

    def _send_report(self, report: KeptReport, now: float) -> None:
        if self._state.driver is not None:
            report.sent_at = now
            self._state.send(self._state.driver, report.message, report.payload)

    def _confirm(self, peer: Peer, update_id: int) -> None:
        """UPDATE_COMMITTED, with what runners have forgotten so that learners may, too."""
        state = self._state
        forgotten = pack_ranges(
            FragmentRange(FragmentId(runner.uuid, runner.incarnation, runner.first_unacked), 0, 0)
            for runner in state.runners.values()
        )
        state.send(peer, UpdateCommitted(update_id, state.generation), tuple(forgotten))
