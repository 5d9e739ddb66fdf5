"""Recovery of updates in flight when ranks die or register again, or the broker restarts.

An update that a rank has trained, or was told to train, is kept, even if an earlier broker planned it. All other
updates are released and planned again for the current group.
"""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState, Peer, Run
from rlzmq.protocol.events import Quarantine
from rlzmq.wire.fragment_message import FragmentRange
from rlzmq.wire.schema import FragmentId

__all__ = ["Recovery"]


class Recovery:
    """Keeps the updates in flight consistent with the learner group's memory."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    # ------------------------------------------------------------------ learners' memory

    def learner_joined(
        self, peer: Peer, trained: list[FragmentRange], training: list[list[FragmentRange]]
    ) -> None:
        """Adopt the updates that a registering rank has trained or was told to train."""
        hello = peer.hello
        self.note_trained(trained)
        for update_id, attempt, ranges in zip(
            hello.training_updates, hello.training_attempts, training, strict=True
        ):
            self.adopt(update_id, attempt, ranges)
        self._state.group_next_update = None  # recomputed once the group is complete

    def note_trained(self, ranges: list[FragmentRange]) -> None:
        """Mark ranges that a learner has trained as done, and release plans that contain them."""
        state = self._state
        for fragment, first, num_steps in ranges:
            entry = state.ledger.entries.get(fragment)
            if entry is not None and first + num_steps >= entry.num_steps:
                state.to_be_reported(entry)  # an earlier broker may have died before its report
        state.ledger.note_trained(ranges)
        for run in sorted(state.runs.values(), key=lambda run: run.update_id):
            if not run.is_training and any(self._is_done(item) for item in run.ranges):
                self.release(run.update_id)
                return

    def adopt(self, update_id: int, attempt: int, ranges: list[FragmentRange]) -> None:
        """Adopt an update that learners train or have trained under another broker's plan."""
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
            self.release(update_id)
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

    # ------------------------------------------------------------------ a complete group

    def on_group_complete(self) -> None:
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
        state.group_next_update = max(updates)
        # Updates run in order, so none can have begun after one without TRAIN.
        begun = max(updates)
        while begun in state.runs and state.runs[begun].is_training:
            begun += 1
        for run in sorted(state.runs.values(), key=lambda run: -run.update_id):
            is_same = run.generation == state.generation
            if run.is_training and run.update_id < max(updates):
                run.generation = state.generation
            elif not is_same or run.update_id < max(updates) or (run.is_training and run.update_id > begun):
                if not is_same:
                    self._blame_deaths(run)
                self.release(run.update_id)

    def _blame_deaths(self, run: Run) -> None:
        """Count a rank's death against the fragments that it was training, and quarantine those above the limit."""
        state = self._state
        if not run.is_training or run.update_id != state.next_commit:
            return
        alive = {peer.uuid for peer in state.ranks.values()}
        dead = [rank for rank, uuid in enumerate(run.rank_uuids) if uuid not in alive]
        blamed = [item for rank in dead for item in run.shards[rank]] if run.shards else run.ranges
        self.release(run.update_id)
        for fragment in dict.fromkeys(item.fragment for item in blamed):
            entry = state.ledger.entries.get(fragment)
            if entry is None:
                continue
            entry.deaths += 1
            if entry.deaths >= state.options.death_limit:
                detail = f"{fragment}: {entry.deaths} learners died with it"
                self.set_aside(entry.id, "quarantined", detail)
                state.drop(entry, "quarantined")

    def set_aside(self, fragment: FragmentId, event: str, detail: str) -> None:
        """Quarantine an unusable fragment if it is still held, count it against its runner, and notify the driver."""
        state = self._state
        entry, peer = state.ledger.entries.get(fragment), state.runners.get(fragment.runner)
        if entry is not None:
            state.out.append(Quarantine(entry.id, detail, entry.frames))
        if peer is not None:
            peer.num_bad += 1
            peer.num_unusable += 1
            state.blamed.append((peer.uuid, detail))
        name = entry.runner_name if entry is not None else peer.hello.name if peer is not None else ""
        state.notify(event, "runner", name, detail)

    def release(self, from_update: int = -1) -> None:
        """Release the steps of updates from `from_update` on. Earlier updates keep theirs."""
        state = self._state
        for update_id in [u for u in state.runs if u >= from_update]:
            state.ledger.release(state.runs.pop(update_id).ranges)
        for run in state.runs.values():
            state.ledger.reserve(run.ranges)

    def _is_done(self, item: FragmentRange) -> bool:
        entry = self._state.ledger.entries.get(item.fragment)
        return entry is None or entry.done > item.first
