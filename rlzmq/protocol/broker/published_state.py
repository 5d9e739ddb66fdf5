"""The newest weights and connector state, and their distribution to runners.

```
 rank 0 ── WEIGHTS ──► store ─► PUB to all runners; SNAPSHOT to a runner that joins late or requests it
 driver ── CONNECTOR_STATE ──► store ─► each runner, before its next lease
```
"""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState, Peer
from rlzmq.protocol.events import Publish, Received
from rlzmq.protocol.weights import notice_of, open_publication
from rlzmq.wire.codec import Buffer
from rlzmq.wire.messages import ConnectorState, Snapshot, SnapshotRequest, Weights

__all__ = ["PublishedState"]


class PublishedState:
    """Holds the newest weights, from rank 0 of the current generation, and the newest connector state."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._asked_at = float("-inf")

    # ------------------------------------------------------------------ weights

    def put_weights(self, peer: Peer, message: Weights, event: Received, now: float) -> None:
        """Store and publish weights from rank 0 if they are newer."""
        state = self._state
        if peer.hello.rank != 0 or message.generation != state.generation or not event.payload:
            state.count_refused("weights")
            return
        header, _ = open_publication(event.payload[0])
        if header.run_id != state.options.run_id or header.order != (message.generation, message.version):
            state.count_refused("weights")
            return
        if state.weights is not None and header.order <= state.weights.order:
            return
        state.weights, state.weights_frame = header, event.payload[0]
        state.out.append(Publish(self._publication()))
        self.release_published()

    def release_published(self) -> None:
        """Free the slots of updates whose weights have been published."""
        state = self._state
        if state.weights is not None:
            for update_id in [u for u in state.unpublished if u < state.weights.version]:
                del state.unpublished[update_id]

    def ask_for_weights(self, now: float) -> None:
        """Request weights from rank 0 if it has newer ones, because a message was lost or this broker is new."""
        state = self._state
        rank_0 = state.ranks.get(0)
        if rank_0 is None or now - self._asked_at < state.options.resend_s:
            return
        have = state.weights.order if state.weights is not None else (-1, -1)
        if have < (state.generation, rank_0.next_update):
            self._asked_at = now
            state.send(rank_0, SnapshotRequest(*have))

    def on_snapshot_request(self, peer: Peer, message: SnapshotRequest, event: Received, now: float) -> None:
        """Send a runner the weights or connector state that its lease requires and that it lacks."""
        state = self._state
        if state.weights is not None and state.weights.order > (message.generation, message.version):
            state.send(peer, Snapshot(*state.weights.order), (state.weights_frame,))
        if message.connector_version < state.connector_version:
            self._send_connector_state(peer)

    def _publication(self) -> Buffer:
        """Return the frame for PUB: the weights, or a notice if they are large."""
        state = self._state
        assert state.weights is not None
        if state.weights.num_bytes <= state.options.push_weights_below_bytes:
            return state.weights_frame
        return notice_of(state.weights)

    # ------------------------------------------------------------------ connector state

    def put_connector_state(self, peer: Peer, message: ConnectorState, event: Received, now: float) -> None:
        """Store the driver's merged connector state if it is newer."""
        state = self._state
        if message.version > state.connector_version and event.payload:
            state.connector_version = message.version
            state.connector_message = (message, event.payload[0])

    def send_connector_state(self, peer: Peer) -> None:
        """Send the newest connector state if this runner has not received it."""
        if peer.connector_version < self._state.connector_version:
            self._send_connector_state(peer)

    def _send_connector_state(self, peer: Peer) -> None:
        state = self._state
        if state.connector_message is not None:
            message, blob = state.connector_message
            peer.connector_version = state.connector_version
            state.send(peer, message, (blob,))

    # ------------------------------------------------------------------ both

    def greet(self, peer: Peer) -> None:
        """Send the newest connector state and weights to a runner that joins."""
        state = self._state
        self._send_connector_state(peer)
        if state.weights is not None and not peer.hello.next_seq:
            state.send(peer, Snapshot(*state.weights.order), (state.weights_frame,))
