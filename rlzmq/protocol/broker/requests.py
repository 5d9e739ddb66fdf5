"""Requests: the driver's requests of updates, lineages and pauses, and its state when it registers."""

from __future__ import annotations

from dataclasses import replace

from rlzmq.protocol.broker.recovery import Recovery
from rlzmq.protocol.broker.reports import Reports
from rlzmq.protocol.broker.state import BrokerState, OpenedUpdate, Peer
from rlzmq.protocol.events import Received
from rlzmq.wire.errors import BoundExceededError
from rlzmq.wire.fragment_message import FragmentRange
from rlzmq.wire.messages import (
    Config,
    DriverState,
    Hello,
    OpenUpdate,
    Pause,
    Reset,
    Resume,
    TraceClock,
    TraceEvents,
)

__all__ = ["Requests"]

_MAX_TRACE_BYTES = 1 << 20
_TRACE_ANSWER_S = 1.0  # after which the driver's answer counts as lost


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

    def on_driver_state(self, message: DriverState) -> None:
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
        if state.driver is not None and now - peer.traced_at >= _TRACE_ANSWER_S:
            peer.traced_at = now
            state.send(state.driver, replace(message, source=peer.uuid), event.payload)

    def on_trace_clock(self, message: TraceClock) -> None:
        """Forward the driver's answer to its peer."""
        state = self._state
        for peer in state.by_routing.values():
            if peer.uuid == message.source:
                peer.traced_at = float("-inf")
                state.send(peer, message)
