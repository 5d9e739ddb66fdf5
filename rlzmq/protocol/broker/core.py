"""BrokerCore: the broker's state machine, with typed events in, instructions out, and time as an argument.

```
 runners ── FRAGMENT ─► accept ─► ledger ─► exact shards ─► learners ── UPDATE_DONE ─► commit
    ▲                                                           │                        │
    ├──── LEASE ◄── grants ◄── open updates ◄── driver ◄── UPDATE_REPORT ◄───────────────┤
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
from typing import Any, TypeAlias

from rlzmq.protocol.broker.grants import Grants
from rlzmq.protocol.broker.intake import Intake
from rlzmq.protocol.broker.registration import Registration
from rlzmq.protocol.broker.reports import Reports, progress_of, status_of
from rlzmq.protocol.broker.state import BrokerOptions, BrokerState, OpenedUpdate, Peer, PublishedState
from rlzmq.protocol.broker.updates import Delivery, Recovery, Updates
from rlzmq.protocol.events import (
    Instruction,
    Malformed,
    Overrun,
    PeerLost,
    Received,
    Send,
    Tick,
)
from rlzmq.protocol.peer_core import NARROW_PATH
from rlzmq.wire.codec import BoundExceededError, Buffer, SchemaError, WireError, WireMessage
from rlzmq.wire.fragment_message import FragmentRange, unpack_ranges
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
    Pause,
    Refused,
    Rejected,
    Reset,
    Resume,
    RunnerState,
    ShardReady,
    ShardRefused,
    SnapshotRequest,
    Status,
    StatusRequest,
    TraceClock,
    TraceEvents,
    UpdateDone,
    Weights,
    encode_message,
)
from rlzmq.wire.values import pack_blob

__all__ = ["Admission", "BrokerCore", "BrokerEvent", "BrokerOptions", "Requests"]


BrokerEvent: TypeAlias = Received | Malformed | Overrun | PeerLost | Tick


class BrokerCore:
    """The broker's state machine: dispatches each event to its part and checks the timers.

    Attributes:
        more_status: Returns additional STATUS fields that only the I/O side knows.
        on_trace: Called with the driver's messages about this broker's own trace.
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
        self._delivery = Delivery(state)
        self._reports = Reports(state)
        recovery = Recovery(state)
        requests = Requests(state, recovery, self._reports)
        self._updates = Updates(state, self._store, recovery, self._delivery, self._reports)
        self._admission = Admission(state, self._registration, self._intake, recovery, requests)
        self._beat_at = float("-inf")
        self._forgot_at = float("-inf")
        self._handlers: dict[type[WireMessage], Callable[[Peer, Any, Received, float], None]] = {
            Fragment: self._intake.on_fragment,
            RunnerState: self._on_runner_state,
            LeaseReturned: self._grants.on_returned,
            SnapshotRequest: self._store.on_snapshot_request,
            LearnerState: self._on_learner_state,
            ShardReady: self._delivery.on_ready,
            ShardRefused: self._updates.on_shard_refused,
            UpdateDone: self._updates.on_update_done,
            Weights: self._store.put_weights,
            DriverState: requests.on_driver_state,
            OpenUpdate: requests.on_open_update,
            ConnectorState: self._store.put_connector_state,
            Pause: requests.on_pause,
            Resume: requests.on_pause,
            Reset: requests.on_reset,
            Config: requests.on_config,
            StatusRequest: self._on_status_request,
            TraceEvents: requests.on_trace_events,
            TraceClock: requests.on_trace_clock,
            Goodbye: self._registration.on_goodbye,
        }

    def handle(self, event: BrokerEvent, now: float) -> list[Instruction]:
        """Process one event and return the resulting instructions.

        Args:
            event: The event. Messages must have been decoded by `messages.decode_message`.
            now: Seconds of a `FairClock`, so that nobody is missed for a time in which this process did not run.
        """
        state = self.state
        state.now = now
        if state.started_at is None:
            state.started_at = now
        if isinstance(event, Received):
            self._on_received(event, now)
        elif isinstance(event, Tick):
            self._on_tick(now)
        elif isinstance(event, PeerLost):
            peer = state.by_routing.get(event.peer)
            if peer is not None:
                self._registration.forget(peer, "lost", "unreachable")
        elif isinstance(event, Overrun):
            self._admission.on_overrun(event)
        else:
            self._admission.on_malformed(event)
        self._updates.progress(now)
        self._admission.expel_blamed()
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
        return status_of(self.state, self.state.now)

    # ------------------------------------------------------------------ messages

    def _on_received(self, event: Received, now: float) -> None:
        peer = self._admission.admit(event, now)
        if peer is None:
            return
        try:
            self._handlers[type(event.message)](peer, event.message, event, now)
        except WireError as error:
            self._admission.offend(peer, error.reason, str(error))

    def _on_runner_state(self, peer: Peer, message: RunnerState, event: Received, now: float) -> None:
        self._intake.on_runner_state(peer, message)
        if message.connector_version < peer.connector_version and not message.leases:
            peer.connector_version = message.connector_version
        self._grants.heartbeat(peer, message, now)

    def _on_learner_state(self, peer: Peer, message: LearnerState, event: Received, now: float) -> None:
        self._delivery.on_learner_state(peer, message, now)
        if message.generation == self.state.generation:
            if 2 in message.phases and message.progress != peer.progress:
                self.state.moved("training", now)
            peer.progress, peer.pace_s = message.progress, message.patience_s

    def _on_status_request(self, peer: Peer, message: StatusRequest, event: Received, now: float) -> None:
        self.state.send(peer, Status(), (pack_blob({**self.status(), **self.more_status()}),))

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
        self._reports.send_again(now)
        beat = BrokerBeat(options.incarnation)
        encoded = tuple(encode_message(beat))
        others = (peer for peer in state.by_routing.values() if peer is not state.driver)
        state.out.extend(Send(peer.routing, beat, whole=encoded) for peer in others)
        if state.driver is not None:
            state.send(state.driver, beat)
            state.send(state.driver, progress_of(state))


_MAX_OFFENCES = 10
# The run's own runners are replaced long before this. An external runner must restart after it is expelled.
_MAX_UNUSABLE = 10


class Admission:
    """Filter in front of the other parts of the broker."""

    def __init__(
        self,
        state: BrokerState,
        registration: Registration,
        intake: Intake,
        recovery: Recovery,
        requests: Requests,
    ) -> None:
        self._state = state
        self._registration = registration
        self._intake = intake
        self._recovery = recovery
        self._requests = requests

    def admit(self, event: Received, now: float) -> Peer | None:
        """Return the sender if it is registered and may send this message; otherwise handle the message here."""
        state, message = self._state, event.message
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
            self.offend(peer, "role", f"a {peer.hello.role} does not send {type(message).__name__}")
            return None
        return peer

    def offend(self, peer: Peer, reason: str, detail: str) -> None:
        """Count a protocol violation of a registered peer. Expel the peer after too many."""
        state, role = self._state, peer.hello.role
        state.count_refused(reason)
        peer.num_bad += 1
        peer.num_offences += 1
        state.send(peer, Rejected(-1, reason, detail[:1000]))
        state.notify("protocol_error", role, peer.hello.name, detail)
        if peer.num_offences >= _MAX_OFFENCES and role != "driver":
            self._registration.expel(
                peer, f"{peer.num_offences} messages that a {role} never sends; the last: {detail}"
            )

    def on_malformed(self, event: Malformed) -> None:
        """Handle a message that the codec could not decode."""
        state = self._state
        peer = state.by_routing.get(event.peer)
        if peer is not None:
            self.offend(peer, event.reason, event.detail)
            return
        state.count_refused(event.reason)
        if event.reason == "version":
            state.send(event.peer, Refused("version", event.detail[:1000]))

    def on_overrun(self, event: Overrun) -> None:
        """Expel a peer that never reads its answers, so that it cannot be warned."""
        self._state.count_refused("overrun")
        peer = self._state.by_routing.get(event.peer)
        if peer is not None:
            self._registration.expel(peer, "it does not read its messages")

    def expel_blamed(self) -> None:
        """Expel runners that sent too many fragments that learners could not use."""
        blamed, self._state.blamed = self._state.blamed, []
        for runner, detail in blamed:
            peer = self._state.runners.get(runner)
            if peer is not None and peer.num_unusable >= _MAX_UNUSABLE:
                self._registration.expel(peer, f"{peer.num_unusable} unusable fragments; the last: {detail}")

    # ------------------------------------------------------------------ unregistered senders

    def _on_hello(self, event: Received, message: Hello, now: float) -> None:
        state = self._state
        ranges: list[list[FragmentRange]] = []
        seated = state.by_routing.get(event.peer)
        if event.origin and seated is not None and seated.uuid != message.uuid:
            detail = f"one connection belongs to one process: this one is {seated.uuid[:60]}, not {message.uuid[:60]}"
            self.offend(seated, "identity", detail)
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
            self._recovery.learner_joined(peer, ranges[0], ranges[1:])
        elif message.role == "driver":
            self._requests.driver_joined(message, ranges[0] if ranges else [], now)

    def _on_stranger(self, event: Received, message: WireMessage) -> None:
        """Answer an unregistered sender: a peer of an earlier broker, or one that was lost or fenced."""
        if isinstance(message, Goodbye):
            return
        if isinstance(message, Fragment) and message.runner in self._state.fenced:
            self._intake.on_fenced_fragment(event, message)
        else:
            self._state.send(event.peer, Refused("unknown_peer", "say HELLO first"))


def _learner_ranges(message: Hello, payload: tuple[Buffer, ...]) -> list[list[FragmentRange]]:
    """Parse a learner's HELLO payload: trained ranges, then the ranges of each update in training."""
    num_updates = len(message.training_updates)
    if len(message.training_attempts) != num_updates or len(payload) != 2 + 2 * num_updates:
        raise SchemaError(f"a learner's HELLO with {num_updates} updates came with {len(payload)} frames")
    return [unpack_ranges(payload[index : index + 2]) for index in range(0, len(payload), 2)]


_MAX_TRACE_BYTES = 1 << 20


class Requests:
    """Handles the driver's messages. Those of an earlier lineage are ignored."""

    def __init__(self, state: BrokerState, recovery: Recovery, reports: Reports) -> None:
        self._state = state
        self._recovery = recovery
        self._reports = reports

    # ------------------------------------------------------------------ registration

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
            for update_id in [u for u in state.runs if u < next_report]:
                state.ledger.note_trained(state.runs.pop(update_id).ranges)
            for update_id in [u for u in state.open if u < next_report]:
                del state.open[update_id]
            for entry in [e for e in state.ledger.entries.values() if e.generation < hello.generation]:
                state.drop(entry, "rolled_back")
        self._reports.driver_has(next_report)
        self._reports.send_all(now)
        state.ledger.disown_below(
            [fragment for fragment, _, _ in watermarks]
        )  # reported by an earlier broker
        for fragment, _, _ in watermarks:
            state.receipts.let_go_below(fragment)

    def _take_over(self, hello: Hello) -> None:
        """Add the driver's counts, without those already counted here."""
        accounting = self._state.ledger.accounting
        dropped = {
            reason: max(0, count - accounting.dropped.get(reason, 0))
            for reason, count in hello.dropped.items()
        }
        accounting.add_base(max(0, hello.trained - accounting.trained), dropped)

    def on_driver_state(self, peer: Peer, message: DriverState, event: Received, now: float) -> None:
        """Handle the driver's heartbeat: the reports that it has, and its verdict on the run."""
        self._state.bottleneck = message.bottleneck
        if message.min_generation == self._state.min_generation:
            self._reports.driver_has(message.next_report)

    # ------------------------------------------------------------------ requests

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
        if state.generation < message.generation:
            state.ranks.clear()
            state.generation = -1
        self._recovery.release()
        for entry in list(state.ledger.entries.values()):
            if entry.generation < message.generation:
                state.drop(entry, "rolled_back")
        for lease_id in list(state.leases.leases):
            state.leases.end(lease_id)
        if state.weights is not None and state.weights.generation < message.generation:
            state.weights = None
        state.open.clear()
        self._reports.give_up()
        state.unpublished.clear()
        state.terms = None
        state.next_commit = message.next_update

    def on_pause(self, peer: Peer, message: Pause | Resume, event: Received, now: float) -> None:
        """Handle PAUSE or RESUME: whether leases are granted."""
        self._state.is_paused = isinstance(message, Pause)

    def on_config(self, peer: Peer, message: Config, event: Received, now: float) -> None:
        """Store the run's config for processes that request it before HELLO."""
        if event.payload:
            self._state.config = (message, event.payload[0])

    # ------------------------------------------------------------------ the trace

    def on_trace_events(self, peer: Peer, message: TraceEvents, event: Received, now: float) -> None:
        """Forward a peer's stages to the driver, at most one message until the driver has answered.

        Raises:
            BoundExceededError: They are too large.
        """
        state = self._state
        num_bytes = sum(memoryview(frame).nbytes for frame in event.payload)
        if num_bytes > _MAX_TRACE_BYTES or len(event.payload) > 1:
            raise BoundExceededError(
                f"TraceEvents of {num_bytes} bytes: at most {_MAX_TRACE_BYTES} are forwarded"
            )
        if state.driver is not None and now - peer.traced_at >= state.options.resend_s / 2:
            peer.traced_at = now
            state.send(state.driver, replace(message, source=peer.uuid), event.payload)

    def on_trace_clock(self, peer: Peer, message: TraceClock, event: Received, now: float) -> None:
        """Forward the driver's answer to its peer."""
        state = self._state
        for traced in state.by_routing.values():
            if traced.uuid == message.source:
                traced.traced_at = float("-inf")
                state.send(traced, message)
