"""What the protocol cores take from the network, and their instructions to their roles.

A core performs no I/O. Whatever arrives is a message (`rlzmq.wire.messages`), which the core takes as it is; what a
role does by itself (a lease was sampled, a shard was decoded, time has passed) is a method of its core. Both return
instructions, to be performed in order. Time is passed as ``now``, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlzmq.protocol.weights import Publication
from rlzmq.wire.codec import Buffer, FragmentId, WireMessage
from rlzmq.wire.messages import Notice, Progress, Shard, ShardPlan, UpdateReport, encode_message

__all__ = [
    "ApplyConnectorState",
    "ApplyWeights",
    "DecodeShard",
    "DropShards",
    "Instruction",
    "Malformed",
    "Overrun",
    "PeerLost",
    "Publish",
    "Quarantine",
    "Received",
    "Report",
    "RunUpdate",
    "Send",
    "StartLease",
    "Stop",
    "Tell",
    "Tick",
]

# ------------------------------------------------------------------ events


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


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message arrived and was refused by the codec, with a reason code and text."""

    peer: bytes
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The transport reported that this peer is gone."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Overrun:
    """A message was dropped, because the peer does not read and its send budget is exhausted."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: check the timers."""


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
class StartLease:
    """Sample `num_vector_steps`, or fewer if `max_s` (0: no limit) is reached.

    Answer with `RunnerCore.sampled` or `lease_failed`. Only one lease is started at a time.
    """

    lease_id: int
    update_id: int
    num_vector_steps: int
    generation: int
    weights_version: int
    connector_version: int
    max_s: float = 0.0
    is_sorted_by_env: bool = False


@dataclass(frozen=True, slots=True)
class ApplyWeights:
    """Load these weights, whose digest has been checked; only between leases."""

    header: Publication
    body: Buffer


@dataclass(frozen=True, slots=True)
class ApplyConnectorState:
    """Set this connector state (one `values.pack_blob` frame); only between leases."""

    version: int
    blob: Buffer


@dataclass(frozen=True, slots=True)
class DecodeShard:
    """Decode and check a shard's fragment (`fragment_message.decode_fragment`), and cut out its range.

    Keep it under (update_id, attempt, index). Answer with `LearnerCore.shard_decoded` or `shard_failed`.
    """

    shard: Shard
    frames: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """Train on the decoded shards of the plan's update and attempt, in the order of index.

    Answer with `LearnerCore.update_trained`.
    """

    plan: ShardPlan


@dataclass(frozen=True, slots=True)
class DropShards:
    """Discard the decoded shards of this attempt of the update."""

    update_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a committed update, returned once per update, in order.

    Attributes:
        fragments: Fragments reported for the first time: id, env steps, meta blob.
        results: One blob per learner rank.
        watermarks: Committed watermarks that moved, by (runner uuid, incarnation).
        forgotten: Runners that will not come back: (uuid, incarnation).
    """

    report: UpdateReport
    fragments: Sequence[tuple[FragmentId, int, Buffer]]
    results: Sequence[Buffer]
    watermarks: dict[tuple[str, int], int]
    forgotten: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """Pass a message to the driver's supervisor or log."""

    message: Notice | Progress


@dataclass(frozen=True, slots=True)
class Stop:
    """End the role, because it was refused or fenced, got GOODBYE, or has left."""

    reason: str
    detail: str = ""


Instruction: TypeAlias = (
    Send
    | Publish
    | Quarantine
    | StartLease
    | ApplyWeights
    | ApplyConnectorState
    | DecodeShard
    | RunUpdate
    | DropShards
    | Report
    | Tell
    | Stop
)
