"""Intake of fragments: each one is accepted once, recognized as a duplicate, or refused with a reason.

```
 FRAGMENT ─► from its own runner? ─► plausible? ─► its lease ends ─► new, valid, of this lineage, room? ─► ledger
                     │ no               │ no                                │ no
                     ▼                  ▼                                   ▼
                 violation          violation             refused: counted, and the runner informed
```
"""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState, Peer
from rlzmq.protocol.core import Received
from rlzmq.protocol.ledger import DropReason, GrantedLease, RunnerRecord
from rlzmq.wire.codec import SchemaError
from rlzmq.wire.messages import Accepted, Committed, Fragment, Rejected, RunnerState
from rlzmq.wire.payloads import to_spans

__all__ = ["Intake"]

# Bound of sequence numbers ahead of the watermark. A runner has far fewer unfinished fragments.
_MAX_SEQ_AHEAD = 65_536


class Intake:
    """Accepts fragments into the ledger and acknowledges them to their runners.

    Protocol violations raise `SchemaError` before any state has changed.
    """

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    # ------------------------------------------------------------------ fragments

    def on_fragment(self, peer: Peer, message: Fragment, event: Received, now: float) -> None:
        """Handle a fragment from a registered runner.

        Raises:
            SchemaError: The fragment is from another runner, or its numbers are impossible.
        """
        state = self._state
        fragment = message.fragment_id
        if (message.runner, message.incarnation) != (peer.uuid, peer.incarnation):
            state.send(peer, Rejected(message.seq, "fenced", f"this is {peer.uuid} of {peer.incarnation}"))
            raise SchemaError(f"{fragment} came from {peer.uuid} of incarnation {peer.incarnation}")
        num_bytes = _num_bytes(event)
        if not _is_plausible(message, num_bytes, state.ledger.runner(peer.uuid, peer.incarnation)):
            state.send(peer, Rejected(message.seq, "rejected", "an impossible number"))
            raise SchemaError(f"{fragment}: an impossible sequence number, or number of env steps")
        peer.is_suspect = peer.is_overdue = False
        state.returns.passed(peer.uuid)
        state.leases.changed.add(peer.uuid)
        lease = self._end_lease(peer, message, now)
        if state.ledger.is_committed(fragment):
            state.ledger.accounting.num_duplicates += 1
            state.receipts.accept(peer.uuid, message.seq)
            self._tell_committed(peer)
            return
        if fragment in state.ledger.entries:  # skip the checks of new fragments: its runner must keep it
            state.ledger.accounting.num_duplicates += 1
            state.receipts.accept(peer.uuid, message.seq)
            return
        if self._is_of_a_lost_branch(message):
            self._refuse(peer, message, "stale")
            self._tell_committed(peer)
            return
        reason = _why_not(message, self._newest(), lease.num_env_steps if lease is not None else None)
        if reason is not None:
            self._refuse(peer, message, "rejected")
            state.send(peer, Rejected(message.seq, "rejected", reason))
            state.notify("bad_fragment", "runner", peer.hello.name, reason)
            state.count_bad(peer, reason)
            return
        if message.generation < state.min_generation:
            self._refuse(peer, message, "rolled_back")
            self._tell_committed(peer)
            return
        if lease is None and self._overruns(peer, num_bytes):
            self._refuse(peer, message, "rejected")
            state.send(
                peer, Rejected(message.seq, "overrun", "too many env steps without a lease are pending")
            )
            return
        entry = state.ledger.accept(
            fragment,
            message.num_env_steps,
            generation=message.generation,
            version=message.weights_version,
            frames=event.frames,
            num_bytes=num_bytes,
            runner_name=peer.hello.name,
            now=now,
            env_steps=message.env_steps if len(message.env_steps) <= peer.hello.num_envs else (),
        )
        assert entry is not None, f"{fragment} is neither held nor committed"
        peer.sampled += message.num_env_steps
        peer.has_worked, peer.origin = True, ""
        peer.shown_envs = max(peer.shown_envs, min(peer.hello.num_envs, message.num_env_steps))
        state.most_envs = max(state.most_envs, peer.shown_envs)
        if entry.done >= entry.num_steps:
            # Empty, or trained under an earlier broker that may have died before the report.
            state.to_be_reported(entry)
        state.receipts.accept(peer.uuid, message.seq)

    def _newest(self) -> tuple[int, int] | None:
        """Return the newest (generation, version) of weights of any peer; None if a new broker does not know it."""
        state = self._state
        if state.weights is None or not state.group_is_complete:
            return None
        return state.generation, max(
            state.weights.version, *(peer.next_update for peer in state.ranks.values())
        )

    def _is_of_a_lost_branch(self, message: Fragment) -> bool:
        """Return whether the fragment was sampled with weights that were lost with their rank and are trained again."""
        newest = self._newest()
        return newest is not None and message.generation < newest[0] and message.weights_version > newest[1]

    def _end_lease(self, peer: Peer, message: Fragment, now: float) -> GrantedLease | None:
        """End and return the lease that this fragment fulfils; None if it had ended before."""
        leases = self._state.leases
        lease = leases.leases.get(message.lease_id)
        if lease is None or lease.peer != peer.uuid:
            return None
        leases.end(message.lease_id)
        self._state.moved("collecting", now)
        peer.pace.note(message.num_env_steps, now - max(lease.granted_at, peer.fragment_at))
        peer.travel.note(max(0.0, now - lease.granted_at - message.busy_s))
        peer.sampling.note(message.num_env_steps, message.busy_s)
        self._state.last_delivery = peer.uuid
        peer.fragment_at = now
        return lease

    def _refuse(self, peer: Peer, message: Fragment, reason: DropReason) -> None:
        """Count a refused fragment. Its runner may forget it."""
        self._state.ledger.refuse(message.fragment_id, message.num_env_steps, reason)
        self._state.receipts.may_forget(peer.uuid, peer.incarnation).commit(message.seq)

    def _overruns(self, peer: Peer, num_bytes: int) -> bool:
        """Return whether a fragment without a lease exceeds what a runner may send again to a new broker."""
        state, options = self._state, self._state.options
        share = max(options.window_bytes, options.memory_bytes // len(state.runners))
        uncommitted_bytes = state.ledger.runner(peer.uuid, peer.incarnation).uncommitted_bytes
        return (
            state.ledger.num_bytes + num_bytes > options.resent_bytes
            and uncommitted_bytes + num_bytes > share
        )

    def on_fenced_fragment(self, event: Received, message: Fragment) -> None:
        """Refuse a fragment from a fenced process."""
        state = self._state
        record = state.ledger.runners.get((message.runner, message.incarnation))
        if record is not None and _is_plausible(message, _num_bytes(event), record):
            state.ledger.refuse(message.fragment_id, message.num_env_steps, "fenced")
        state.send(event.peer, Rejected(message.seq, "fenced", "superseded by a newer process"))

    # ------------------------------------------------------------------ acknowledgements

    def on_runner_state(self, peer: Peer, message: RunnerState) -> None:
        """Handle the part of a runner's heartbeat that names the fragments it no longer holds.

        Raises:
            SchemaError: The runner cannot have sent that many fragments.
        """
        state = self._state
        record = state.ledger.runner(peer.uuid, peer.incarnation)
        if not 0 <= message.first_unacked <= record.watermark + _MAX_SEQ_AHEAD:
            raise SchemaError(
                f"first_unacked is {message.first_unacked}, but {record.watermark} are committed"
            )
        if message.first_unacked > peer.first_unacked:
            peer.first_unacked = message.first_unacked
            state.forgetters[peer.uuid] = None
        state.ledger.commit_below(peer.uuid, peer.incarnation, message.first_unacked)
        forgettable = state.receipts.may_forget(peer.uuid, peer.incarnation)
        forgettable.commit_below(message.first_unacked)
        if forgettable.watermark > message.first_unacked:
            self._tell_committed(peer)  # the last COMMITTED was lost

    def acknowledge(self) -> None:
        """Tell runners which fragments were accepted (unless a lease did) and which they may forget."""
        state, receipts = self._state, self._state.receipts
        for runner, incarnation in receipts.take_news():
            peer = state.runners.get(runner)
            if peer is not None and peer.incarnation == incarnation:
                self._tell_committed(peer)
        for runner in receipts.runners_to_tell():
            peer = state.runners.get(runner)
            accepted = receipts.take_accepted(runner)
            if peer is not None:
                state.send(peer, Accepted(peer.incarnation, accepted))

    def _tell_committed(self, peer: Peer) -> None:
        record = self._state.receipts.may_forget(peer.uuid, peer.incarnation)
        self._state.send(peer, Committed(peer.incarnation, record.watermark, to_spans(record.beyond)))


def _num_bytes(event: Received) -> int:
    return sum(memoryview(frame).nbytes for frame in event.frames)


def _is_plausible(message: Fragment, num_bytes: int, record: RunnerRecord) -> bool:
    """Return whether a fragment's numbers are possible. An env step takes at least one byte."""
    return (
        0 <= message.num_env_steps <= num_bytes
        and 0 <= message.seq <= record.watermark + _MAX_SEQ_AHEAD
        and len(record.beyond) <= _MAX_SEQ_AHEAD
    )


def _why_not(message: Fragment, newest: tuple[int, int] | None, leased_env_steps: int | None) -> str | None:
    """Return why a fragment is invalid, or None."""
    num_steps = message.num_env_steps
    if leased_env_steps is not None and num_steps > leased_env_steps:
        return f"{message.fragment_id}: {num_steps} env steps for a lease of {leased_env_steps}"
    if message.weights_version < 0 or message.generation < 0:
        return f"{message.fragment_id}: negative version or generation"
    if newest is not None and (message.generation > newest[0] or message.weights_version > newest[1]):
        return (
            f"{message.fragment_id}: sampled with weights {message.weights_version} of generation "
            f"{message.generation}, the newest are version {newest[1]} of generation {newest[0]}"
        )
    return None
