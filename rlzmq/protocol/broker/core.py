"""BrokerCore: the broker's state machine, with messages in, instructions out, and time as an argument.

```
 runners ── FRAGMENT ─► accept ─► ledger ─► exact shards ─► learners ── UPDATE_DONE ─► commit
    ▲                                                           │                        │
    ├──── LEASE ◄── grants ◄── open updates ◄── driver ◄── COMMIT_REPORT ◄───────────────┤
    └──── COMMITTED ◄────────────────────────────────────────────────────────────────────┘
 rank 0 ── WEIGHTS ─► store ─► PUB, SNAPSHOT
```

Guarantees. An accepted fragment is trained exactly once in a lineage, or dropped with a counted reason;
``sampled = trained + dropped + pending`` always holds. Every rank trains exactly its share of a batch. Weights versions
increase per generation. Any peer, and the broker itself, may die, come back, or lose, repeat and reorder messages:
unanswered messages are sent again, repeated ones are recognized, and a new broker rebuilds its ledger from the data of
runners, learners and the driver.

A message reaches the other parts only if its sender is registered and its role may send it. A HELLO
registers its sender if it matches the run (see `Registration`) and its training claims can be parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rlzmq.core.patience import NARROW_PATH
from rlzmq.protocol.broker.grants import Grants
from rlzmq.protocol.broker.intake import Intake
from rlzmq.protocol.broker.registration import Registration
from rlzmq.protocol.broker.state import BrokerOptions, BrokerState, Peer, Plan, PublishedState
from rlzmq.protocol.broker.updates import Updates, progress_of
from rlzmq.protocol.core import Instruction, Received, Send
from rlzmq.wire.codec import BoundExceededError, Buffer, SchemaError, WireError, WireMessage
from rlzmq.wire.messages import (
    BrokerBeat,
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
    Refused,
    Rejected,
    Reset,
    RunnerState,
    ShardReady,
    ShardRefused,
    SnapshotRequest,
    Status,
    StatusRequest,
    TraceEvents,
    UpdateDone,
    Weights,
    encode_message,
)
from rlzmq.wire.payloads import FragmentRange, pack_blob, unpack_ranges

__all__ = ["BrokerCore", "BrokerOptions"]


class BrokerCore:
    """The broker's state machine: lets peers speak, dispatches each message to its part, and checks the timers.

    Each step takes the time in seconds of a `FairClock`, so that nobody is missed for a time in which this process did
    not run, and returns the resulting instructions.

    Attributes:
        more_status: Returns additional STATUS fields that only the I/O side knows.
    """

    state: BrokerState

    def __init__(self, options: BrokerOptions) -> None:
        self.options = options
        self.more_status: Callable[[], dict[str, Any]] = dict
        state = self.state = BrokerState(options)
        self._store = PublishedState(state)
        self._registration = Registration(state, self._store)
        self._intake = Intake(state)
        self._grants = Grants(state, self._store)
        self._updates = Updates(state, self._store)
        self._beat_at = float("-inf")
        self._forgot_at = float("-inf")
        self._handlers: dict[type[WireMessage], Callable[[Peer, Any, Received, float], None]] = {
            Fragment: self._intake.on_fragment,
            RunnerState: self._on_runner_state,
            LeaseReturned: self._grants.on_returned,
            SnapshotRequest: self._store.on_snapshot_request,
            LearnerState: self._on_learner_state,
            ShardReady: self._updates.on_ready,
            ShardRefused: self._updates.on_shard_refused,
            UpdateDone: self._updates.on_update_done,
            Weights: self._store.put_weights,
            DriverState: self._updates.on_driver_state,
            OpenUpdate: self._updates.on_open_update,
            ConnectorState: self._store.put_connector_state,
            Reset: self._updates.on_reset,
            Config: self._on_config,
            StatusRequest: self._on_status_request,
            TraceEvents: self._on_trace_events,
            Goodbye: self._registration.on_goodbye,
        }

    def handle(self, event: Received, now: float) -> list[Instruction]:
        """Process a message, which `messages.decode_message` has decoded."""
        self._begin(now)
        peer = self._admit(event, now)
        if peer is not None:
            try:
                self._handlers[type(event.message)](peer, event.message, event, now)
            except WireError as error:
                self._offend(peer, error.reason, str(error))
        return self._finish(now)

    def tick(self, now: float) -> list[Instruction]:
        """Check the timers; to be called regularly."""
        self._begin(now)
        self._on_tick(now)
        return self._finish(now)

    def refuse(self, routing: bytes, reason: str, detail: str, now: float) -> list[Instruction]:
        """Refuse a message that the codec could not decode, with its reason code and text."""
        self._begin(now)
        state, peer = self.state, self.state.by_routing.get(routing)
        if peer is not None:
            self._offend(peer, reason, detail)
        else:
            state.count_refused(reason)
            if reason == "version":
                state.send(routing, Refused("version", detail[:1000]))
        return self._finish(now)

    def lost(self, routing: bytes, now: float) -> list[Instruction]:
        """Note that the transport says that this peer is gone."""
        self._begin(now)
        peer = self.state.by_routing.get(routing)
        if peer is not None:
            self._registration.forget(peer, "lost", "unreachable")
        return self._finish(now)

    def overrun(self, routing: bytes, now: float) -> list[Instruction]:
        """Note that a message was dropped, because the peer does not read and its send budget is exhausted.

        The peer, which cannot be warned, is expelled.
        """
        self._begin(now)
        self.state.count_refused("overrun")
        peer = self.state.by_routing.get(routing)
        if peer is not None:
            self._registration.expel(peer, "it does not read its messages")
        return self._finish(now)

    def _begin(self, now: float) -> None:
        self.state.now = now
        if self.state.started_at is None:
            self.state.started_at = now

    def _finish(self, now: float) -> list[Instruction]:
        """Do whatever has become possible; return the instructions."""
        state = self.state
        self._updates.progress(now)
        self._expel_offenders()
        state.take_committed()
        self._grants.progress(now)
        self._intake.acknowledge()
        out, state.out = state.out, []
        return out

    def data_moves(self, peers: Iterable[bytes], now: float) -> None:
        """Note that parts of messages of these peers have arrived: they are there, their messages take long."""
        for routing in peers:
            self.state.by_routing[routing].heard(now)

    def stop(self, reason: str) -> list[Instruction]:
        """Return a GOODBYE for every peer."""
        for peer in self.state.by_routing.values():
            self.state.send(peer, Goodbye(reason))
        out, self.state.out = self.state.out, []
        return out

    def status(self) -> dict[str, Any]:
        """Return the broker's state for observers, as plain values, with ages in seconds."""
        return _status_of(self.state, self.state.now)

    # ------------------------------------------------------------------ who may speak

    def _admit(self, event: Received, now: float) -> Peer | None:
        """Return the sender if it is registered and may send this message; otherwise handle the message here."""
        state, message = self.state, event.message
        if isinstance(message, Hello):
            self._on_hello(event, message, now)
            return None
        if isinstance(message, ConfigRequest):
            if state.config is not None:
                config, packed = state.config
                if state.config_requests.try_again(event.peer):
                    name = event.peer.decode("utf-8", "replace")
                    state.notify("path", "observer", name, NARROW_PATH)
                state.send(event.peer, config, (packed,))
            else:
                state.send(event.peer, Refused("no_driver", "no driver has connected yet"))
            return None
        peer = state.by_routing.get(event.peer)
        if peer is None:
            self._on_stranger(event, message)
            return None
        peer.heard(now)
        if peer.hello.role not in message.senders:
            self._offend(peer, "role", f"a {peer.hello.role} does not send {type(message).__name__}")
            return None
        return peer

    def _offend(self, peer: Peer, reason: str, detail: str) -> None:
        """Refuse a message that violates the protocol, and count it against the registered peer that sent it."""
        state = self.state
        state.count_refused(reason)
        state.send(peer, Rejected(-1, reason, detail[:1000]))
        state.notify("protocol_error", peer.hello.role, peer.hello.name, detail)
        state.count_bad(peer, detail)

    def _expel_offenders(self) -> None:
        """Expel the peers that sent too much that nobody can use. Those of this run are then replaced."""
        offenders, self.state.offenders = self.state.offenders, {}
        for routing, detail in offenders.items():
            peer = self.state.by_routing.get(routing)
            if peer is not None:
                self._registration.expel(peer, f"{peer.num_bad} messages of no use; the last: {detail}")

    def _on_hello(self, event: Received, message: Hello, now: float) -> None:
        state = self.state
        ranges: list[list[FragmentRange]] = []
        seated = state.by_routing.get(event.peer)
        if event.origin and seated is not None and seated.uuid != message.uuid:
            detail = f"one connection belongs to one process: this one is {seated.uuid[:60]}, not {message.uuid[:60]}"
            self._offend(seated, "identity", detail)
            return
        try:
            if message.role == "learner":
                ranges = _learner_ranges(message, event.payload)
            elif message.role == "driver" and event.payload:
                ranges = [unpack_ranges(event.payload)]
        except WireError as error:
            state.count_refused(error.reason)
            state.send(event.peer, Refused(error.reason, str(error)[:1000], message.generation))
            return
        peer = self._registration.hello(event.peer, message, now, event.origin)
        if peer is None:
            return
        if message.role == "learner":
            self._updates.learner_joined(peer, ranges[0], ranges[1:])
        elif message.role == "driver":
            self._updates.driver_joined(message, ranges[0] if ranges else [], now)

    def _on_stranger(self, event: Received, message: WireMessage) -> None:
        """Answer an unregistered sender: a peer of an earlier broker, or one that was lost or fenced."""
        if isinstance(message, Goodbye):
            return
        if isinstance(message, Fragment) and message.runner in self.state.fenced:
            self._intake.on_fenced_fragment(event, message)
        else:
            self.state.send(event.peer, Refused("unknown_peer", "say HELLO first"))

    # ------------------------------------------------------------------ messages

    def _on_runner_state(self, peer: Peer, message: RunnerState, event: Received, now: float) -> None:
        self._intake.on_runner_state(peer, message)
        if message.connector_version < peer.connector_version and not message.leases:
            peer.connector_version = message.connector_version
        self._grants.heartbeat(peer, message, now)

    def _on_learner_state(self, peer: Peer, message: LearnerState, event: Received, now: float) -> None:
        self._updates.on_learner_state(peer, message, now)
        if message.generation == self.state.generation:
            if 2 in message.phases and message.progress != peer.progress:
                self.state.moved("training", now)
            peer.progress, peer.pace_s = message.progress, message.patience_s

    def _on_status_request(self, peer: Peer, message: StatusRequest, event: Received, now: float) -> None:
        self.state.send(peer, Status(), (pack_blob({**self.status(), **self.more_status()}),))

    def _on_config(self, peer: Peer, message: Config, event: Received, now: float) -> None:
        """Store the run's config for processes that request it before HELLO."""
        if event.payload:
            self.state.config = (message, event.payload[0])

    def _on_trace_events(self, peer: Peer, message: TraceEvents, event: Received, now: float) -> None:
        """Forward a peer's stages to the driver, not more often than it should send them.

        Raises:
            BoundExceededError: They are too large.
        """
        state = self.state
        num_bytes = sum(memoryview(frame).nbytes for frame in event.payload)
        if num_bytes > _MAX_TRACE_BYTES or len(event.payload) > 1:
            raise BoundExceededError(
                f"TraceEvents of {num_bytes} bytes: at most {_MAX_TRACE_BYTES} are forwarded"
            )
        pause_s = state.options.heartbeat_s / 2
        if state.driver is not None and now >= peer.traced_at - pause_s:  # one may be early: the last
            peer.traced_at = max(now, peer.traced_at) + pause_s
            state.send(state.driver, replace(message, source=peer.uuid), event.payload)

    # ------------------------------------------------------------------ time

    def _on_tick(self, now: float) -> None:
        state, options = self.state, self.options
        self._grants.expire(now)
        for peer in [peer for peer in state.by_routing.values() if peer.silence.is_over(now)]:
            self._registration.forget(peer, "lost", f"silent for {peer.silence.silent_s(now):.1f} s")
        if now - self._forgot_at >= 20 * options.heartbeat_s:
            self._forgot_at = now
            state.forget_absent(now)
        self._store.ask_for_weights(now)
        if now - self._beat_at < options.heartbeat_s:
            return
        self._beat_at = now
        self._updates.send_reports_again(now)
        beat = BrokerBeat(options.incarnation)
        encoded = tuple(encode_message(beat))
        others = (peer for peer in state.by_routing.values() if peer is not state.driver)
        state.out.extend(Send(peer.routing, beat, whole=encoded) for peer in others)
        if state.driver is not None:
            state.send(state.driver, beat)
            state.send(state.driver, progress_of(state))


def _learner_ranges(message: Hello, payload: tuple[Buffer, ...]) -> list[list[FragmentRange]]:
    """Parse a learner's HELLO payload: trained ranges, then the ranges of each update in training."""
    num_updates = len(message.training_updates)
    if len(message.training_attempts) != num_updates or len(payload) != 2 + 2 * num_updates:
        raise SchemaError(f"a learner's HELLO with {num_updates} updates came with {len(payload)} frames")
    return [unpack_ranges(payload[index : index + 2]) for index in range(0, len(payload), 2)]


_MAX_TRACE_BYTES = 1 << 20


def _status_of(state: BrokerState, now: float) -> dict[str, Any]:
    """Return the broker's state for observers, as plain values, with ages in seconds."""
    accounting = state.ledger.accounting
    leases = {uuid: state.leases.of_peer(uuid) for uuid in state.runners}
    oldest = next(iter(state.ledger.entries.values()), None)
    return {
        "run_id": state.options.run_id,
        "incarnation": state.options.incarnation,
        "generation": state.generation,
        "weights": list(state.weights.order) if state.weights else None,
        "next_commit": state.next_commit,
        "open_updates": sorted(state.open),
        "updates_in_flight": sorted(state.plans),
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
        "bottleneck": state.bottleneck,
        "accounting": {**accounting.counts(), "dropped": dict(accounting.dropped)},
        "num_duplicates": accounting.num_duplicates,
        "num_fragments_held": len(state.ledger.entries),
        "oldest_fragment_s": now - oldest.accepted_at if oldest is not None else 0.0,
        "fragment_bytes": state.ledger.num_bytes,
        "num_env_steps_leased": state.leases.leased_env_steps(),
        "refused": dict(state.refused),
        "still_s": state.still_s(now),
        "waits": _waits_of(state, now),
    }


def _waits_of(state: BrokerState, now: float) -> list[str]:
    """Return one line per waiting role. The first one blocks the next update."""
    update_id = state.next_commit
    if state.driver is None:
        return ["broker: waits for a driver"]
    if update_id is None or update_id not in state.open:
        return [f"broker: waits for the driver to open update {update_id}"]
    plan = state.plans.get(update_id)
    lines = _collecting(state, update_id, now) if plan is None else _training(state, plan)
    if not state.group_is_complete:
        here = ", ".join(peer.hello.name for peer in state.ranks.values()) or "none"
        lines.append(f"broker: waits for learners: the group has {state.num_ranks}, registered: {here}")
    return lines


def _collecting(state: BrokerState, update_id: int, now: float) -> list[str]:
    update = state.open[update_id].terms
    oldest, newest = state.version_bounds(update)
    ready, leased = state.ledger.free_steps(oldest, newest), state.leases.leased_env_steps()
    lines = [
        f"broker: has been collecting update {update_id} for {now - state.open[update_id].at:.1f} s: {ready} of "
        f"{state.batch_of(update)} env steps have arrived, {leased} are leased"
    ]
    if state.weights is None or state.weights.version < update.weights_version:
        lines.append(f"broker: waits for rank 0's weights of version {update.weights_version}")
    if not state.runners:
        lines.append("broker: waits for env runners, none is registered")
    for peer in state.runners.values():
        leases = state.leases.of_peer(peer.uuid)
        what = f"samples a lease granted {now - leases[0].granted_at:.1f} s ago" if leases else "has no lease"
        lines.append(f"{peer.hello.name}: {what}, last heard {now - peer.heard_at:.1f} s ago")
    return lines


def _training(state: BrokerState, plan: Plan) -> list[str]:
    done = {rank for rank, peer in state.ranks.items() if peer.uuid in plan.done_by}
    missing = set(range(state.num_ranks)) - (done if plan.is_training else plan.ready)
    names = {rank: peer.hello.name for rank, peer in state.ranks.items()}
    those = (
        ", ".join(names.get(rank, f"rank {rank} (not registered)") for rank in sorted(missing)) or "nobody"
    )
    what = "the result" if plan.is_training else "READY"
    return [f"broker: waits for {what} of update {plan.update_id} from {those}"]
