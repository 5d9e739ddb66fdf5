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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from rlzmq.protocol.broker.admission import Admission
from rlzmq.protocol.broker.grants import Grants
from rlzmq.protocol.broker.intake import Intake
from rlzmq.protocol.broker.options import BrokerOptions
from rlzmq.protocol.broker.published_state import PublishedState
from rlzmq.protocol.broker.recovery import Recovery
from rlzmq.protocol.broker.registration import Registration
from rlzmq.protocol.broker.reports import Reports, progress_of, status_of
from rlzmq.protocol.broker.requests import Requests
from rlzmq.protocol.broker.state import BrokerState, Peer
from rlzmq.protocol.broker.updates import Delivery, Updates
from rlzmq.protocol.events import (
    Instruction,
    Malformed,
    Overrun,
    PeerLost,
    Received,
    Send,
    Tick,
)
from rlzmq.wire.errors import WireError
from rlzmq.wire.messages import (
    BrokerBeat,
    Config,
    ConnectorState,
    DriverState,
    Fragment,
    Goodbye,
    LearnerState,
    LeaseReturned,
    OpenUpdate,
    Pause,
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
    WireMessage,
    encode_message,
)
from rlzmq.wire.values import pack_blob

__all__ = ["BrokerCore", "BrokerEvent", "BrokerOptions"]

BrokerEvent: TypeAlias = Received | Malformed | Overrun | PeerLost | Tick

_FORGET_EVERY_S = 10.0


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
        requests = self._requests = Requests(state, recovery, self._reports)
        self._updates = Updates(state, self._store, recovery, self._delivery, self._reports)
        self._admission = Admission(state, self._registration, self._intake, recovery, requests)
        self._beat_at = float("-inf")
        self._forgot_at = float("-inf")
        self._handlers: dict[type[WireMessage], Callable[[Peer, Any, Received, float], None]] = {
            Fragment: self._intake.on_fragment,
            RunnerState: self._on_runner_state,
            LeaseReturned: lambda peer, message, event, now: self._grants.returned(peer, message),
            SnapshotRequest: self._store.on_snapshot_request,
            LearnerState: self._on_learner_state,
            ShardReady: self._on_shard_ready,
            ShardRefused: lambda peer, message, event, now: self._updates.on_shard_refused(message),
            UpdateDone: self._updates.on_update_done,
            Weights: self._store.put_weights,
            DriverState: self._on_driver_state,
            OpenUpdate: requests.on_open_update,
            ConnectorState: self._store.put_connector_state,
            Pause: requests.on_pause,
            Resume: requests.on_pause,
            Reset: requests.on_reset,
            Config: requests.on_config,
            StatusRequest: self._on_status_request,
            TraceEvents: requests.on_trace_events,
            TraceClock: self._on_trace_clock,
            Goodbye: lambda peer, message, event, now: self._registration.forget(
                peer, "left", message.reason
            ),
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

    def _on_driver_state(self, peer: Peer, message: DriverState, event: Received, now: float) -> None:
        self._requests.on_driver_state(message)

    def _on_shard_ready(self, peer: Peer, message: ShardReady, event: Received, now: float) -> None:
        if message.rank == peer.hello.rank:
            self._delivery.on_ready(message, now)

    def _on_status_request(self, peer: Peer, message: StatusRequest, event: Received, now: float) -> None:
        self.state.send(peer, Status(), (pack_blob({**self.status(), **self.more_status()}),))

    def _on_trace_clock(self, peer: Peer, message: TraceClock, event: Received, now: float) -> None:
        self._requests.on_trace_clock(message)

    # ------------------------------------------------------------------ time

    def _on_tick(self, now: float) -> None:
        state, options = self.state, self.options
        self._grants.expire(now)
        for peer in [peer for peer in state.by_routing.values() if peer.silence.is_over(now)]:
            self._registration.forget(peer, "lost", f"silent for {peer.silence.silent_s(now):.1f} s")
        if now - self._forgot_at >= _FORGET_EVERY_S:
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
