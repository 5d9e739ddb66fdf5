"""Admission of messages: answers unregistered senders, counts protocol violations, and expels offenders.

A message reaches the other parts only if its sender is registered and its role may send it. A HELLO
registers its sender if it matches the run (see `Registration`) and its training claims can be parsed.
"""

from __future__ import annotations

from rlzmq.protocol.broker.intake import Intake
from rlzmq.protocol.broker.recovery import Recovery
from rlzmq.protocol.broker.registration import Registration
from rlzmq.protocol.broker.requests import Requests
from rlzmq.protocol.broker.state import BrokerState, Peer
from rlzmq.protocol.events import Malformed, Overrun, Received
from rlzmq.protocol.narrow_path import NARROW_PATH
from rlzmq.wire.codec import Buffer
from rlzmq.wire.errors import SchemaError, WireError
from rlzmq.wire.fragment_message import FragmentRange, unpack_ranges
from rlzmq.wire.messages import ConfigRequest, Fragment, Goodbye, Hello, Refused, Rejected, WireMessage

__all__ = ["Admission"]

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
