"""The broker, without its sockets: typed events in, instructions out, time passed in.

```
 runners ── FRAGMENT ─► accept ─► ledger ─► exact shards ─► learners ── UPDATE_DONE ─► commit
    ▲                                                           │                        │
    ├──── LEASE ◄── grants ◄── open updates ◄── driver ◄── UPDATE_REPORT ◄───────────────┤
    └──── COMMITTED ◄────────────────────────────────────────────────────────────────────┘
 rank 0 ── WEIGHTS ─► store ─► PUB, SNAPSHOT
```

Promises. An accepted fragment is trained exactly once in a lineage or dropped with a counted reason;
``sampled = trained + dropped + pending`` at every moment. Every rank trains exactly its share of a
batch. Weights versions rise per generation. Any peer, and the broker itself, may die, come back, or
lose, repeat and reorder messages: what is unanswered is sent again, what is repeated is recognised,
and a new broker rebuilds its ledger from what runners, learners and the driver still hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from rlzmq.protocol.broker_grants import Grants, take_acks
from rlzmq.protocol.broker_journal import on_journal
from rlzmq.protocol.broker_peers import Door, publication_for_pub
from rlzmq.protocol.broker_state import BrokerOptions, BrokerState, Peer
from rlzmq.protocol.broker_updates import Updates
from rlzmq.protocol.broker_watch import Watch
from rlzmq.protocol.codec import Buffer
from rlzmq.protocol.errors import SchemaError, WireError
from rlzmq.protocol.events import (
    Instruction,
    JournalFailed,
    JournalRecalled,
    JournalSynced,
    Malformed,
    PeerLost,
    Publish,
    Received,
    Stop,
    Tick,
)
from rlzmq.protocol.ledger import RunnerRecord
from rlzmq.protocol.messages import (
    Accepted,
    BrokerBeat,
    Committed,
    Config,
    ConfigRequest,
    ConnectorState,
    DriverState,
    Fragment,
    Goodbye,
    Hello,
    LearnerState,
    LeaseReturned,
    OpenUpdate,
    Pause,
    Progress,
    Refused,
    Rejected,
    Reset,
    Resume,
    RunnerState,
    ShardReady,
    ShardRefused,
    Snapshot,
    SnapshotRequest,
    Status,
    StatusRequest,
    UpdateDone,
    Weights,
    WireMessage,
)
from rlzmq.protocol.ranges import FragmentRange, to_spans, unpack_ranges
from rlzmq.protocol.schema import FragmentId
from rlzmq.protocol.values import pack_blob
from rlzmq.protocol.weights import open_publication

__all__ = ["BrokerCore", "BrokerEvent", "BrokerOptions"]

BrokerEvent: TypeAlias = (
    Received | Malformed | PeerLost | Tick | JournalSynced | JournalFailed | JournalRecalled
)

# Who may say what; the rest is refused and counted, so a runner's key cannot publish weights.
_SAYS: dict[str, frozenset[type[WireMessage]]] = {
    "runner": frozenset({RunnerState, Fragment, LeaseReturned, SnapshotRequest, StatusRequest, Goodbye}),
    "learner": frozenset(
        {LearnerState, ShardReady, ShardRefused, UpdateDone, Weights, StatusRequest, Goodbye}
    ),
    "driver": frozenset(
        {DriverState, OpenUpdate, ConnectorState, Pause, Resume, Reset, Config, StatusRequest, Goodbye}
    ),
    "observer": frozenset({StatusRequest, Goodbye}),
}

_MAX_OFFENCES = 10
# A run's own runners are replaced long before; one from outside starts anew when it is expelled.
_MAX_UNUSABLE = 10
# Sequence numbers ahead of the first that is not done with: a runner's unfinished ones are far fewer.
_MAX_SEQ_AHEAD = 65_536
_FORGET_EVERY_S = 10.0


class BrokerCore:
    """See the module's head.

    Args:
        options: See `BrokerOptions`.

    Attributes:
        more_status: Called for what STATUS says beyond `status`: what only the I/O side knows.
    """

    def __init__(self, options: BrokerOptions) -> None:
        self.options = options
        self.more_status: Callable[[], dict[str, Any]] = dict
        self.state = BrokerState(options)
        self._door = Door(self.state)
        self._updates = Updates(self.state)
        self._grants = Grants(self.state)
        self._watch = Watch(self.state)
        self._now = 0.0
        self._beat_at = float("-inf")
        self._forgot_at = float("-inf")
        self._ticked_at: float | None = None
        self._weights_asked_at = float("-inf")
        self._handlers: dict[type[WireMessage], Callable[[Peer, Received, float], None]] = {
            Fragment: self._on_fragment,
            RunnerState: self._on_runner_state,
            LeaseReturned: self._on_lease_returned,
            SnapshotRequest: self._on_snapshot_request,
            LearnerState: self._on_learner_state,
            ShardReady: self._on_shard_ready,
            ShardRefused: self._on_shard_refused,
            UpdateDone: self._on_update_done,
            Weights: self._on_weights,
            DriverState: self._on_driver_state,
            OpenUpdate: self._on_open_update,
            ConnectorState: self._on_connector_state,
            Pause: self._on_pause,
            Resume: self._on_resume,
            Reset: self._on_reset,
            Config: self._on_config,
            StatusRequest: self._on_status_request,
            Goodbye: self._on_goodbye,
        }

    def handle(self, event: BrokerEvent, now: float) -> list[Instruction]:
        """One event in, what to do about it out.

        Args:
            event: What happened. Messages must have been decoded by `messages.decode_message`.
            now: Seconds of a monotonic clock; never decreases.
        """
        state = self.state
        self._now = now
        if state.started_at is None:
            state.started_at = now
        if isinstance(event, Received):
            self._on_received(event, now)
        elif isinstance(event, Tick):
            self._on_tick(now)
        elif isinstance(event, JournalSynced | JournalFailed | JournalRecalled):
            on_journal(state, self._updates, event, now)
        elif isinstance(event, PeerLost):
            peer = state.by_routing.get(event.peer)
            if peer is not None:
                self._door.forget(peer, "lost", "unreachable")
        else:
            self._on_malformed(event)
        self._updates.progress(now)
        self._grants.progress(now)
        self._acknowledge()
        out, state.out = [*state.journal.take(), *state.out], []
        return out

    def stop(self, reason: str) -> list[Instruction]:
        """Says goodbye to everyone."""
        for peer in self.state.by_routing.values():
            self.state.send(peer, Goodbye(reason))
        out, self.state.out = self.state.out, []
        return out

    def status(self) -> dict[str, Any]:
        """Everything an observer may want to see, as plain values; ages in seconds."""
        state, now = self.state, self._now
        accounting = state.ledger.accounting
        leases = {uuid: state.leases.of_peer(uuid) for uuid in state.runners}
        oldest = next(iter(state.ledger.entries.values()), None)
        return {
            "run_id": self.options.run_id,
            "incarnation": self.options.incarnation,
            "generation": state.generation,
            "weights": list(state.weights.order) if state.weights else None,
            "next_commit": state.next_commit,
            "open_updates": sorted(state.open),
            "updates_in_flight": sorted(state.runs),
            "runners": [
                {
                    "name": peer.hello.name,
                    "incarnation": peer.incarnation,
                    "num_leases": len(leases[uuid]),
                    "oldest_lease_s": now - leases[uuid][0].granted_at if leases[uuid] else 0.0,
                    "env_steps_per_s": peer.pace.env_steps_per_s,
                    "num_uncommitted": state.ledger.runner(uuid, peer.incarnation).num_uncommitted,
                    "num_env_steps": peer.sampled,
                    "num_bad": peer.num_bad,
                    "is_suspect": peer.is_suspect,
                }
                for uuid, peer in sorted(state.runners.items())
            ],
            "learners": [
                {"name": peer.hello.name, "rank": rank, "next_update": peer.next_update}
                for rank, peer in sorted(state.ranks.items())
            ],
            "has_driver": state.driver is not None,
            "accounting": {**accounting.counts(), "dropped": dict(accounting.dropped)},
            "num_duplicates": accounting.num_duplicates,
            "num_fragments_held": len(state.ledger.entries),
            "oldest_fragment_s": now - oldest.accepted_at if oldest is not None else 0.0,
            "fragment_bytes": state.ledger.num_bytes,
            "num_env_steps_leased": state.leases.leased_env_steps(),
            "refused": dict(state.refused),
        }

    # ------------------------------------------------------------------ dispatch

    def _on_received(self, event: Received, now: float) -> None:
        state, message = self.state, event.message
        if isinstance(message, Hello):
            self._on_hello(event, message, now)
            return
        if isinstance(message, ConfigRequest):
            if state.config is not None:
                config = replace(state.config[0], driver=state.driver_incarnation)
                state.send(event.peer, config, (state.config[1],))
            else:
                state.send(event.peer, Refused("no_driver", "no driver has come yet"))
            return
        peer = state.by_routing.get(event.peer)
        if peer is None:
            self._on_stranger(event, message)
            return
        peer.heard_at = now
        self._watch.heard(peer, now)
        if type(message) not in _SAYS[peer.hello.role]:
            self._offence(peer, "role", f"a {peer.hello.role} does not send {type(message).__name__}")
            return
        try:
            self._handlers[type(message)](peer, event, now)
        except WireError as error:
            self._offence(peer, error.reason, str(error))

    def _offence(self, peer: Peer, reason: str, detail: str) -> None:
        """A registered peer sent what no peer of this version sends. One that goes on with it is expelled."""
        state, role = self.state, peer.hello.role
        state.count_refused(reason)
        peer.num_bad += 1
        peer.num_offences += 1
        state.send(peer, Rejected(-1, reason, detail[:1000]))
        state.notify("protocol_error", role, peer.hello.name, detail)
        if peer.num_offences >= _MAX_OFFENCES and role != "driver":
            self._door.expel(peer, f"{peer.num_offences} messages that no {role} sends; the last: {detail}")

    def _on_hello(self, event: Received, message: Hello, now: float) -> None:
        state = self.state
        ranges: list[list[FragmentRange]] = []
        if message.role in ("learner", "driver"):
            try:
                if message.role == "learner":
                    ranges = _learner_ranges(message, event.payload)
                elif event.payload:
                    ranges = [unpack_ranges(event.payload)]
            except WireError as error:
                state.count_refused(error.reason)
                state.send(event.peer, Refused(error.reason, str(error)[:1000], message.generation))
                return
        peer = self._door.hello(event.peer, message, now)
        if peer is None:
            return
        if message.role == "learner":
            self._updates.learner_joined(peer, ranges[0], ranges[1:])
        elif message.role == "driver":
            state.driver_seen_at = now
            self._updates.driver_joined(message, now)
            for fragment, _, _ in ranges[0] if ranges else ():
                self._settle(fragment)

    def _settle(self, watermark: FragmentId) -> None:
        """The driver has reports of everything below: an earlier broker saw to it."""
        state = self.state
        state.ledger.disown_below(*watermark)
        state.may_forget(watermark.runner, watermark.incarnation).commit_below(watermark.seq)
        state.news_for.add((watermark.runner, watermark.incarnation))

    def _on_stranger(self, event: Received, message: WireMessage) -> None:
        """A peer of a broker before this one, one declared lost, or one that was fenced."""
        state = self.state
        if isinstance(message, Goodbye):
            return
        if isinstance(message, Fragment) and message.runner in state.fenced:
            record = state.ledger.runners.get((message.runner, message.incarnation))
            if record is not None and _is_plausible(message, _num_bytes(event), record):
                state.ledger.refuse(message.fragment_id, message.num_env_steps, "fenced")
            state.send(event.peer, Rejected(message.seq, "fenced", "superseded by a newer process"))
            return
        state.send(event.peer, Refused("unknown_peer", "say HELLO first"))

    def _on_malformed(self, event: Malformed) -> None:
        state = self.state
        peer = state.by_routing.get(event.peer)
        if peer is not None:
            self._offence(peer, event.reason, event.detail)
            return
        state.count_refused(event.reason)
        if event.reason == "version":
            state.send(event.peer, Refused("version", event.detail[:1000]))

    # ------------------------------------------------------------------ runners

    def _on_fragment(self, peer: Peer, event: Received, now: float) -> None:
        state, message = self.state, event.message
        assert isinstance(message, Fragment)
        fragment = message.fragment_id
        if (message.runner, message.incarnation) != (peer.uuid, peer.incarnation):
            state.send(peer, Rejected(message.seq, "fenced", f"this is {peer.uuid} of {peer.incarnation}"))
            raise SchemaError(f"{fragment} came from {peer.uuid} of incarnation {peer.incarnation}")
        num_bytes = _num_bytes(event)
        if not _is_plausible(message, num_bytes, state.ledger.runner(peer.uuid, peer.incarnation)):
            state.send(peer, Rejected(message.seq, "rejected", "an impossible number"))
            raise SchemaError(f"{fragment}: an impossible sequence number, or number of env steps")
        peer.is_suspect = False
        lease = state.leases.leases.get(message.lease_id)
        if lease is not None and lease.peer == peer.uuid:
            state.leases.end(message.lease_id)
            peer.pace.note(message.num_env_steps, now - max(lease.granted_at, peer.fragment_at))
            peer.fragment_at = now
        else:
            lease = None
        if state.ledger.is_committed(fragment):
            state.ledger.accounting.num_duplicates += 1
            state.acks.setdefault(peer.uuid, set()).add(message.seq)
            self._tell_committed(peer)
            return
        reason = self._why_not(message, lease.num_env_steps if lease is not None else None)
        if reason is not None:
            peer.num_bad += 1
            state.ledger.refuse(fragment, message.num_env_steps, "rejected")
            state.may_forget(peer.uuid, peer.incarnation).commit(message.seq)
            state.send(peer, Rejected(message.seq, "rejected", reason))
            state.notify("bad_fragment", "runner", peer.hello.name, reason)
            return
        if message.generation < state.min_generation:
            state.ledger.refuse(fragment, message.num_env_steps, "rolled_back")
            state.may_forget(peer.uuid, peer.incarnation).commit(message.seq)
            self._tell_committed(peer)
            return
        if lease is None and self._overruns(peer, num_bytes):
            state.ledger.refuse(fragment, message.num_env_steps, "rejected")
            state.may_forget(peer.uuid, peer.incarnation).commit(message.seq)
            state.send(peer, Rejected(message.seq, "overrun", "too much without a lease is pending"))
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
        )
        if entry is not None:
            peer.sampled += message.num_env_steps
            peer.has_worked = True
            if entry.done >= entry.num_steps:
                # Empty, or trained under an earlier broker, which may have died before its report.
                state.to_be_reported(entry)
            state.journal.accepted(fragment, peer.hello.name, event.frames)
        if not state.journal.is_withheld(fragment):
            state.acks.setdefault(peer.uuid, set()).add(message.seq)

    def _overruns(self, peer: Peer, num_bytes: int) -> bool:
        """Whether a fragment that no lease asked for is more than a runner may have kept for a new broker."""
        state, options = self.state, self.options
        if state.ledger.num_bytes + num_bytes <= options.resent_bytes:
            return False
        share = max(options.window_bytes, options.memory_bytes // max(1, len(state.runners)))
        return state.ledger.runner(peer.uuid, peer.incarnation).uncommitted_bytes + num_bytes > share

    def _why_not(self, message: Fragment, leased_env_steps: int | None) -> str | None:
        """What makes a fragment unacceptable, if anything."""
        num_steps = message.num_env_steps
        if leased_env_steps is not None and num_steps > leased_env_steps:
            return f"{message.fragment_id}: {num_steps} env steps for a lease of {leased_env_steps}"
        if message.weights_version < 0 or message.generation < 0:
            return f"{message.fragment_id}: a negative version or generation"
        return None

    def _on_runner_state(self, peer: Peer, event: Received, now: float) -> None:
        message = event.message
        assert isinstance(message, RunnerState)
        state = self.state
        record = state.ledger.runner(peer.uuid, peer.incarnation)
        if not 0 <= message.first_unacked <= record.watermark + _MAX_SEQ_AHEAD:
            raise SchemaError(f"{message.first_unacked} fragments are done with, of {record.watermark}")
        peer.first_unacked = max(peer.first_unacked, message.first_unacked)
        record.commit_below(message.first_unacked)
        forgettable = state.may_forget(peer.uuid, peer.incarnation)
        forgettable.commit_below(message.first_unacked)
        if forgettable.watermark > message.first_unacked:
            self._tell_committed(peer)  # the COMMITTED before was lost
        if message.connector_version < peer.connector_version and not message.leases:
            peer.connector_version = message.connector_version
        self._grants.heartbeat(peer, message, now)

    def _on_lease_returned(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, LeaseReturned)
        self._grants.returned(peer, event.message)

    def _on_snapshot_request(self, peer: Peer, event: Received, now: float) -> None:
        state, message = self.state, event.message
        assert isinstance(message, SnapshotRequest)
        if state.weights is not None and state.weights.order > (message.generation, message.version):
            state.send(peer, Snapshot(*state.weights.order), (state.weights_frame,))
        if message.connector_version < state.connector_version:
            peer.connector_version = -1
            self._grants.send_connector_state(peer)

    # ------------------------------------------------------------------ learners

    def _on_learner_state(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, LearnerState)
        self._updates.heartbeat(peer, event.message, now)
        self._watch.learner_reports(peer, event.message, now)

    def _on_shard_ready(self, peer: Peer, event: Received, now: float) -> None:
        message = event.message
        assert isinstance(message, ShardReady)
        if message.rank == peer.hello.rank:
            self._updates.ready(message, now)

    def _on_shard_refused(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, ShardRefused)
        self._updates.refused(event.message)
        runner = self.state.runners.get(event.message.fragment.runner)
        if runner is not None and runner.num_unusable >= _MAX_UNUSABLE:
            self._door.expel(
                runner, f"{runner.num_unusable} unusable fragments; the last: {event.message.detail}"
            )

    def _on_update_done(self, peer: Peer, event: Received, now: float) -> None:
        message = event.message
        assert isinstance(message, UpdateDone)
        if message.rank == peer.hello.rank:
            results = event.payload[0] if event.payload else b""
            self._updates.done(peer, message, results, unpack_ranges(event.payload[1:]))

    def _on_weights(self, peer: Peer, event: Received, now: float) -> None:
        state, message = self.state, event.message
        assert isinstance(message, Weights)
        if peer.hello.rank != 0 or message.generation != state.generation or not event.payload:
            state.count_refused("weights")
            return
        header, _ = open_publication(event.payload[0])
        if header.run_id != self.options.run_id or header.order != (message.generation, message.version):
            state.count_refused("weights")
            return
        if state.weights is not None and header.order <= state.weights.order:
            return
        state.weights, state.weights_frame = header, event.payload[0]
        state.out.append(Publish(publication_for_pub(state)))
        self._updates.release_published()

    # ------------------------------------------------------------------ driver

    def _on_driver_state(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, DriverState)
        if event.message.min_generation == self.state.min_generation:
            self._updates.driver_has(event.message.next_report)

    def _on_open_update(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, OpenUpdate)
        if event.message.min_generation == self.state.min_generation:
            self._updates.open(event.message, now)

    def _on_connector_state(self, peer: Peer, event: Received, now: float) -> None:
        state, message = self.state, event.message
        assert isinstance(message, ConnectorState)
        if message.version > state.connector_version and event.payload:
            state.connector_version = message.version
            state.connector_message = (message, event.payload[0])

    def _on_pause(self, peer: Peer, event: Received, now: float) -> None:
        self.state.is_paused = True

    def _on_resume(self, peer: Peer, event: Received, now: float) -> None:
        self.state.is_paused = False

    def _on_reset(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, Reset)
        self._updates.reset(event.message)

    def _on_config(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, Config)
        if event.payload:
            self.state.config = (event.message, event.payload[0])

    def _on_status_request(self, peer: Peer, event: Received, now: float) -> None:
        self.state.send(peer, Status(), (pack_blob({**self.status(), **self.more_status()}),))

    def _on_goodbye(self, peer: Peer, event: Received, now: float) -> None:
        assert isinstance(event.message, Goodbye)
        self._door.forget(peer, "left", event.message.reason)

    # ------------------------------------------------------------------ time

    def _on_tick(self, now: float) -> None:
        state, options = self.state, self.options
        self._forgive_absence(now)
        self._grants.expire(now)
        self._watch.tick(now)
        for peer in list(state.by_routing.values()):
            if now - peer.heard_at >= options.peer_timeout_s:
                self._door.forget(peer, "lost", f"silent for {options.peer_timeout_s:g} s")
        if state.driver is not None:
            state.driver_seen_at = now
        elif state.driver_seen_at is not None and now - state.driver_seen_at >= options.driver_timeout_s:
            state.out.append(Stop("driver_lost", f"no driver for {options.driver_timeout_s:g} s"))
        if now - self._forgot_at >= _FORGET_EVERY_S:
            self._forgot_at = now
            state.forget_absent(now)
        self._ask_for_weights(now)
        if now - self._beat_at < options.heartbeat_s:
            return
        self._beat_at = now
        self._updates.resend_reports(now)
        for peer in state.by_routing.values():
            if peer is not state.driver:
                state.send(peer, BrokerBeat(options.incarnation))
        if state.driver is not None:
            state.send(state.driver, BrokerBeat(options.incarnation))
            state.send(state.driver, self._progress())

    def _forgive_absence(self, now: float) -> None:
        """Where no tick came for long this process was stopped: it was away, not its peers."""
        away = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        if away < self.options.peer_timeout_s / 2:
            return
        state = self.state
        for peer in state.by_routing.values():
            peer.heard_at = min(now, peer.heard_at + away)
        if state.driver_seen_at is not None:
            state.driver_seen_at = min(now, state.driver_seen_at + away)

    def _ask_for_weights(self, now: float) -> None:
        """Rank 0 has newer weights than the store: its message was lost, or this broker is new."""
        state = self.state
        rank_0 = state.ranks.get(0)
        if rank_0 is None or now - self._weights_asked_at < self.options.resend_s:
            return
        have = state.weights.order if state.weights is not None else (-1, -1)
        if have < (state.generation, rank_0.next_update):
            self._weights_asked_at = now
            state.send(rank_0, SnapshotRequest(*have))

    def _progress(self) -> Progress:
        state = self.state
        update_id = state.next_plan if state.next_plan is not None else 0
        update = state.terms_of(update_id)
        oldest, newest = state.version_bounds(update) if update is not None else (-1, None)
        next_open = state.next_commit or 0
        while next_open in state.open:
            next_open += 1
        accounting = state.ledger.accounting
        return Progress(
            update_id=update_id,
            next_open=next_open,
            connector_version=state.connector_version,
            min_generation=state.min_generation,
            num_steps_ready=state.ledger.free_steps(oldest, newest),
            num_steps_leased=state.leases.leased_env_steps(),
            num_runners=len(state.runners),
            num_learners=len(state.ranks),
            weights_version=state.weights.version if state.weights else -1,
            accounting=accounting.counts(),
            dropped=dict(accounting.dropped),
            is_paused=state.is_paused,
        )

    # ------------------------------------------------------------------ acknowledgements

    def _acknowledge(self) -> None:
        """Tells runners what was accepted (unless a lease told them) and what was committed."""
        state = self.state
        state.take_committed()
        for runner, incarnation in sorted(state.news_for):
            peer = state.runners.get(runner)
            if peer is not None and peer.incarnation == incarnation:
                self._tell_committed(peer)
        state.news_for.clear()
        for uuid in list(state.acks):
            peer = state.runners.get(uuid)
            accepted = take_acks(state, uuid)
            if peer is not None:
                state.send(peer, Accepted(peer.incarnation, accepted))

    def _tell_committed(self, peer: Peer) -> None:
        record = self.state.may_forget(peer.uuid, peer.incarnation)
        self.state.send(peer, Committed(peer.incarnation, record.watermark, to_spans(record.beyond)))


def _num_bytes(event: Received) -> int:
    return sum(memoryview(frame).nbytes for frame in event.frames)


def _is_plausible(message: Fragment, num_bytes: int, record: RunnerRecord) -> bool:
    """Whether a fragment's numbers can be true: an env step takes a byte at the very least."""
    return (
        0 <= message.num_env_steps <= num_bytes
        and 0 <= message.seq <= record.watermark + _MAX_SEQ_AHEAD
        and len(record.beyond) <= _MAX_SEQ_AHEAD
    )


def _learner_ranges(message: Hello, payload: tuple[Buffer, ...]) -> list[list[FragmentRange]]:
    """What a learner has trained, then what each of its updates in training takes."""
    num_updates = len(message.training_updates)
    if len(message.training_attempts) != num_updates or len(payload) != 2 + 2 * num_updates:
        raise SchemaError(f"a learner's HELLO with {num_updates} updates came with {len(payload)} frames")
    return [unpack_ranges(payload[index : index + 2]) for index in range(0, len(payload), 2)]
