"""What the broker does about its journal: acknowledgements that were withheld, fragments that come back."""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState
from rlzmq.protocol.events import JournalFailed, JournalRecalled, JournalSynced
from rlzmq.protocol.journal import Recalled
from rlzmq.wire.schema import FragmentId

__all__ = ["on_journal"]


def on_journal(
    state: BrokerState, event: JournalSynced | JournalFailed | JournalRecalled, now: float
) -> None:
    """Something happened on disk."""
    if isinstance(event, JournalRecalled):
        if event.generation == state.min_generation:  # else this lineage is over already
            for item in event.fragments:
                _give_back(state, item, now)
        return
    if isinstance(event, JournalFailed):
        due = state.journal.failed()
        state.notify("journal_failed", "broker", "broker", f"{event.detail}; going on without it")
    else:
        due = state.journal.synced(event.number)
    for fragment in due:
        _acknowledge(state, fragment)


def _acknowledge(state: BrokerState, fragment: FragmentId) -> None:
    peer = state.runners.get(fragment.runner)
    if peer is not None and peer.incarnation == fragment.incarnation:
        state.receipts.accept(peer.uuid, fragment.seq)


def _give_back(state: BrokerState, item: Recalled, now: float) -> None:
    """As if its runner had sent it just now; what does not fit any more is dropped with its reason."""
    message = item.message
    entry = state.ledger.accept(
        message.fragment_id,
        message.num_env_steps,
        generation=state.min_generation,
        version=message.weights_version,
        frames=item.frames,
        num_bytes=sum(memoryview(frame).nbytes for frame in item.frames),
        runner_name=item.runner_name,
        now=now,
        env_steps=message.env_steps,
    )
    if entry is None:
        return
    if not entry.num_steps:
        state.to_be_reported(entry)
    elif item.reason is not None:
        state.drop(entry, item.reason)
    else:
        state.journal.accepted(message.fragment_id, item.runner_name, item.frames)
