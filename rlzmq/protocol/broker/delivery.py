"""Delivery of shards to the ranks until all are READY, and then of TRAIN.

```
 planned ─► SHARD_PLAN, SHARD… ─► READY of every rank ─► TRAIN, in order of updates
```

Messages that a rank lacks, according to its heartbeat, are sent again.
"""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState, Peer, Run
from rlzmq.wire.fragment_message import slice_fragment
from rlzmq.wire.messages import LearnerState, Shard, ShardPlan, ShardReady, Train
from rlzmq.wire.ranges import pack_ranges

__all__ = ["Delivery"]


class Delivery:
    """Sends shards and TRAIN to the ranks, and repeats lost messages."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def begin(self, run: Run, now: float) -> None:
        """Send the shards of a newly planned update."""
        for rank in range(run.num_ranks):
            run.sent_at[rank] = now
            self._send_shard(run, rank)

    def on_ready(self, message: ShardReady, now: float) -> None:
        """Record that a rank has decoded its shard; send TRAIN once all have."""
        run = self._state.run_of(message.update_id, message.attempt)
        if run is None or run.generation != message.generation:
            return
        run.ready.add(message.rank)
        if run.is_training:
            self._send_train(run, message.rank)  # its TRAIN was lost
        else:
            self._train_ready(now)

    def _train_ready(self, now: float) -> None:
        """Send TRAIN in the order of updates: while an update may be replanned, so may the next one."""
        for _, run in sorted(self._state.runs.items()):
            if not run.is_training:
                if len(run.ready) < run.num_ranks:
                    return
                run.is_training = True
                for rank in range(run.num_ranks):
                    run.sent_at[rank] = now
                    self._send_train(run, rank)

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
            run.num_steps,
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
            entry = state.ledger.entries[fragment]
            is_whole = num_steps == entry.size
            frames = entry.frames if is_whole else slice_fragment(entry.frames, first, num_steps)
            state.send(peer, message, tuple(frames))

    def _send_train(self, run: Run, rank: int) -> None:
        peer = self._state.ranks.get(rank)
        if peer is not None:
            message = Train(
                self._state.options.incarnation, run.update_id, run.attempt, run.generation, run.num_steps
            )
            self._state.send(peer, message, tuple(pack_ranges(run.ranges)))
