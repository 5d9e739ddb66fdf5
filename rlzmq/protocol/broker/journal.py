"""The broker's reaction to journal events: withheld acknowledgements and restored fragments."""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState
from rlzmq.protocol.events import JournalFailed, JournalRecalled, JournalSynced
from rlzmq.protocol.journal import Recalled
from rlzmq.wire.schema import FragmentId

__all__ = ["on_journal"]


def on_journal(
    state: BrokerState, event: JournalSynced | JournalFailed | JournalRecalled, now: float
) -> None:
    """Handle a journal event."""
    if isinstance(event, JournalRecalled):
        if event.generation == state.min_generation:  # else the lineage has ended
            for item in event.fragments:
                _give_back(state, item, now)
        return
    if isinstance(event, JournalFailed):
        due = state.journal.failed()
        state.notify("journal_failed", "broker", "broker", f"{event.detail}; the run continues without it")
    else:
        due = state.journal.synced(event.number)
    for fragment in due:
        _acknowledge(state, fragment)


def _acknowledge(state: BrokerState, fragment: FragmentId) -> None:
    peer = state.runners.get(fragment.runner)
    if peer is not None and peer.incarnation == fragment.incarnation:
        state.receipts.accept(peer.uuid, fragment.seq)


def _give_back(state: BrokerState, item: Recalled, now: float) -> None:
    """Accept a restored fragment as if its runner had just sent it, or drop it with its reason."""
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
