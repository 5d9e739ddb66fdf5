"""What the state machines of the protocol share: messages in, instructions out; registration and heartbeats of peers.

A core takes a message (`rlzmq.wire.messages`) as it is; whatever else happens (a lease was sampled, an update was
trained, a connection broke, time has passed) is a method of the core. All return instructions, to be performed in
order: what is sent, and the end. A peer's core calls functions of its role for all other work (to sample a lease, to
train an update); what takes long only begins in them. Time is passed as ``now``, in seconds of a monotonic clock.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from rlzmq.core.patience import ANSWER_S, RESEND_S, TICK_S, Patience
from rlzmq.wire.codec import Buffer, FragmentId, WireMessage
from rlzmq.wire.messages import (
    BrokerBeat,
    Goodbye,
    Hello,
    Refused,
    Welcome,
    encode_message,
)

__all__ = [
    "LARGE_BYTES",
    "Instruction",
    "PeerCore",
    "PeerTimers",
    "Publish",
    "Quarantine",
    "Received",
    "Send",
    "Stop",
    "unless_stopped",
]


@dataclass(frozen=True, slots=True)
class Received:
    """A message with a valid header arrived.

    Attributes:
        peer: Routing id on the broker's ROUTER; b"" on a DEALER.
        origin: For a HELLO from another machine, the role of its key and its address; otherwise "".
        frames: All frames of the message, as received; ``frames[1:]`` is the payload.
    """

    peer: bytes
    message: WireMessage
    frames: tuple[Buffer, ...] = (b"",)
    origin: str = ""

    @property
    def payload(self) -> tuple[Buffer, ...]:
        """The frames after the header."""
        return self.frames[1:]


# ------------------------------------------------------------------ instructions


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message. `frames` is its encoding.

    Attributes:
        peer: Routing id on the broker's ROUTER; b"" on a DEALER.
        whole: The encoded frames, if the message is already encoded (as fragments are).
    """

    peer: bytes
    message: WireMessage
    payload: tuple[Buffer, ...] = ()
    whole: tuple[Buffer, ...] = ()

    @property
    def frames(self) -> list[Buffer]:
        """All frames, ready for the socket."""
        return list(self.whole) if self.whole else encode_message(self.message, self.payload)


@dataclass(frozen=True, slots=True)
class Publish:
    """Send one frame on the PUB socket."""

    frame: Buffer


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Save a fragment's frames for inspection, because learners died while training it, or it is malformed."""

    fragment: FragmentId
    reason: str
    frames: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the role, because it was refused or fenced, got GOODBYE, or has left."""

    reason: str
    detail: str = ""


Instruction: TypeAlias = Send | Publish | Quarantine | Stop


P = ParamSpec("P")
Core = TypeVar("Core", bound="PeerCore")


def unless_stopped(
    step: Callable[Concatenate[Core, P], list[Instruction]],
) -> Callable[Concatenate[Core, P], list[Instruction]]:
    """Decorate a step of a core: once the core has stopped, it does nothing."""

    @functools.wraps(step)
    def guarded(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> list[Instruction]:
        return [] if core.is_stopped else step(core, *args, **kwargs)

    return guarded


@dataclass(frozen=True, slots=True)
class PeerTimers:
    """A peer's timers in seconds. The defaults suit one host and a LAN.

    Attributes:
        broker_silence_s: Time without any message from the broker after which the peer registers again, or longer if
            it often is silent; see `Patience`.
        resend_s: Time after which an unanswered message is sent again; HELLO after half of it.
        snapshot_wait_s: How long a lease waits for its weights on PUB before the runner requests them. Doubled with
            each request, up to `resend_s`.
    """

    broker_silence_s: float = ANSWER_S
    resend_s: float = RESEND_S
    snapshot_wait_s: float = TICK_S


class PeerCore(abc.ABC):
    """Base class of the state machines that register with the broker.

    It sends HELLO until it is welcomed, and again whenever the broker falls silent or does not know it. It recognizes a
    restarted broker by its incarnation. Messages may be lost, duplicated and reordered: everything that a peer sends is
    repeated until answered, and everything that it receives may arrive twice.

    Args:
        run_id, name, uuid: See `messages.Hello`.
        timers: See `PeerTimers`.
    """

    def __init__(self, run_id: str, name: str, uuid: str, timers: PeerTimers | None = None) -> None:
        self.run_id = run_id
        self.name = name
        self.uuid = uuid
        self.timers: PeerTimers = timers or PeerTimers()
        self.incarnation: int = 0
        self._digests = ("", "")  # of the package (its version), and the spaces
        self.broker_incarnation: int = -1
        self.is_welcome: bool = False
        self.is_stopped: bool = False
        self._hello_id = 0
        self._hello_at = self._state_at = self._heard_at = float("-inf")
        self._heartbeat_s = float("inf")
        self._silence = Patience(self.timers.broker_silence_s)

    @unless_stopped
    def handle(self, event: Received, now: float) -> list[Instruction]:
        """Process a message of the broker."""
        instructions = self._handle_peer(event, now)
        return self._on_message(event, now) if instructions is None else instructions

    @unless_stopped
    def tick(self, now: float) -> list[Instruction]:
        """Check the timers; to be called regularly."""
        if not self.is_welcome or self._silence.is_over(now):
            return self.start(now) if now - self._hello_at >= self.timers.resend_s / 2 else []
        if now - self._state_at < self._heartbeat_s:
            return []
        self._state_at = now
        return [Send(b"", self._state())]

    @unless_stopped
    def leave(self, now: float, reason: str = "leaving") -> list[Instruction]:
        """Take no more work, deliver finished work, and send GOODBYE."""
        return [Send(b"", Goodbye(reason)), *self._stop("left", reason)]

    @abc.abstractmethod
    def _on_message(self, event: Received, now: float) -> list[Instruction]:
        """Process a message that is not about registration."""

    @abc.abstractmethod
    def _hello(self) -> tuple[Hello, tuple[Buffer, ...]]:
        """Return the HELLO to send now, and its payload."""

    @abc.abstractmethod
    def _state(self) -> WireMessage:
        """Return the heartbeat to send now."""

    @abc.abstractmethod
    def _on_new_broker(self, now: float) -> list[Instruction]:
        """Return the messages to send after the first WELCOME of a (restarted) broker."""

    def _identity(self) -> dict[str, Any]:
        """Return the fields of HELLO that identify the peer and its software."""
        package_version, spaces_digest = self._digests
        return {
            "name": self.name,
            "uuid": self.uuid,
            "incarnation": self.incarnation,
            "run_id": self.run_id,
            "package_version": package_version,
            "spaces_digest": spaces_digest,
        }

    @property
    def heard_at(self) -> float:
        """When the last message from the broker arrived, by the clock of `handle`."""
        return self._heard_at

    def data_moves(self, now: float) -> None:
        """Note that parts of the broker's messages have arrived: it is there, its messages take long."""
        self._heard_at = now
        self._silence.moved(now)

    def start(self, now: float) -> list[Instruction]:
        """Register with the broker, or again if it is silent or does not know this peer."""
        self._hello_at = now
        if self._heard_at == float("-inf"):
            self._heard_at = now  # from when on its silence counts
        self._silence.begin(now)
        self.is_welcome = False
        self._hello_id += 1
        message, payload = self._hello()
        return [Send(b"", replace(message, hello_id=self._hello_id), payload)]

    def _handle_peer(self, event: Received, now: float) -> list[Instruction] | None:
        """Handle registration messages; return None if the message is for the subclass."""
        self._heard_at = now
        self._silence.moved(now)
        message = event.message
        if isinstance(message, Welcome):
            return self._on_welcome(message, now)
        if isinstance(message, Refused):
            if message.reason == "unknown_peer":
                return self.start(now) if now - self._hello_at >= self.timers.resend_s / 20 else []
            return self._stop(message.reason, message.detail)
        if isinstance(message, BrokerBeat):
            if self.is_welcome and message.broker_incarnation > self.broker_incarnation:
                return self.start(now)
            return []
        if isinstance(message, Goodbye):
            return self._stop("goodbye", message.reason)
        return None

    def _on_welcome(self, message: Welcome, now: float) -> list[Instruction]:
        if message.hello_id != self._hello_id or message.broker_incarnation < self.broker_incarnation:
            return []  # it answers an earlier HELLO, or is from a broker that was replaced
        is_new = message.broker_incarnation != self.broker_incarnation
        self.broker_incarnation = message.broker_incarnation
        self._heartbeat_s = message.heartbeat_s
        self.is_welcome = True
        self._state_at = now
        if not is_new:
            return []
        self._silence = Patience(self.timers.broker_silence_s)
        self._silence.begin(now)
        self.incarnation = message.incarnation
        return self._on_new_broker(now)

    def _stop(self, reason: str, detail: str) -> list[Instruction]:
        self.is_stopped = True
        return [Stop(reason, detail)]


LARGE_BYTES = 1200
"""A message of this size shows that full packets pass, or nearly full ones."""
