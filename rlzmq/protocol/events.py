"""What goes into a core and what comes out: events and instructions, as plain data.

A core never does anything: its role's main turns sockets, threads and timers into events, and
instructions into sends and calls. Time comes in as ``now``, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlzmq.protocol.weights import Publication
from rlzmq.wire.codec import Buffer
from rlzmq.wire.messages import Notice, Progress, UpdateReport, Welcome, WireMessage, encode_message
from rlzmq.wire.ranges import FragmentRange
from rlzmq.wire.schema import FragmentId

__all__ = [
    "ApplyConnectorState",
    "ApplyWeights",
    "DecodeShard",
    "DropShards",
    "FragmentSampled",
    "GroupFormed",
    "Instruction",
    "JournalAppend",
    "JournalFailed",
    "JournalRecalled",
    "JournalRemove",
    "JournalSynced",
    "LeaseFailed",
    "Leave",
    "Malformed",
    "NewWeights",
    "Overrun",
    "PeerLost",
    "Publish",
    "Quarantine",
    "Received",
    "ReceivedWeights",
    "Report",
    "RunUpdate",
    "Send",
    "ShardDecoded",
    "ShardFailed",
    "StartLease",
    "Stop",
    "Tell",
    "Tick",
    "UpdateTrained",
]

# ------------------------------------------------------------------ events, any core


@dataclass(frozen=True, slots=True)
class Received:
    """A message came and its header is valid.

    Attributes:
        peer: Routing id on the broker's ROUTER; b"" on a DEALER.
        origin: Of a HELLO from outside: the role of its key, and its address; "" from this machine.
        frames: All frames of the message, as received; ``frames[1:]`` is the payload.
    """

    peer: bytes
    message: WireMessage
    frames: tuple[Buffer, ...] = (b"",)
    origin: str = ""

    @property
    def payload(self) -> tuple[Buffer, ...]:
        """The frames behind the header."""
        return self.frames[1:]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message came and was refused by the codec, with its reason code and text."""

    peer: bytes
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The transport says that this peer is gone."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Overrun:
    """A peer does not read what it is sent, and its budget is used up: a message to it was dropped."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: look at the timers."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Stop taking work, hand over what is finished, then say goodbye."""

    reason: str = "leaving"


# ------------------------------------------------------------------ events, broker


@dataclass(frozen=True, slots=True)
class JournalSynced:
    """Every record up to this number is on disk."""

    number: int


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """The disk does not take the journal any more."""

    detail: str


@dataclass(frozen=True, slots=True)
class JournalRecalled:
    """What the journal of a run before this one holds beyond the checkpoint that this one goes on from.

    Attributes:
        generation: Of the lineage that begins with the checkpoint.
        fragments: `journal.Recalled` items.
    """

    generation: int
    fragments: Sequence[Any]


# ------------------------------------------------------------------ events, runner


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """A publication came on the SUB socket (or its body was fetched from its location)."""

    frame: Buffer


@dataclass(frozen=True, slots=True)
class FragmentSampled:
    """The started lease was sampled.

    Attributes:
        generation, weights_version: The oldest weights used.
        batch, arrays: Of ``EpisodeBatch.to_wire()``. The arrays are kept, not copied, until the
            fragment is committed: never write to them again.
        meta: Any packable value: metrics, connector delta.
        env_steps: Of each environment in order, its env steps, if the lease asks for it.
    """

    lease_id: int
    num_env_steps: int
    generation: int
    weights_version: int
    connector_version: int = -1
    batch: dict[str, Any] = field(default_factory=dict)
    arrays: Sequence[Any] = ()
    meta: Any = None
    env_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """The started lease could not be sampled; its steps go to someone else."""

    lease_id: int
    reason: str


# ------------------------------------------------------------------ events, learner


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """The process group stands (again): this rank's place and the state that all ranks share.

    Attributes:
        next_update: First update that this state has not trained; the same on all ranks.
        memory: `LearnerCore.export_memory` of the rank whose state all adopted; b"" for a new run
            or after a checkpoint was restored. Broadcast it with the state.
        begins_lineage: The state is not what the generation before trained: a checkpoint was restored,
            and the driver's RESET to this generation says so to the broker.
    """

    generation: int
    rank: int
    num_ranks: int
    next_update: int
    memory: Buffer = b""
    begins_lineage: bool = False


@dataclass(frozen=True, slots=True)
class ShardDecoded:
    """A DecodeShard succeeded and its data is usable."""

    update_id: int
    attempt: int
    index: int


@dataclass(frozen=True, slots=True)
class ShardFailed:
    """A DecodeShard failed: this fragment must not be trained."""

    update_id: int
    attempt: int
    index: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class UpdateTrained:
    """A RunUpdate ended in the group's vote: stepped, or skipped by all ranks.

    Attributes:
        num_trained_steps: Steps that went through the loss (counting replayed ones once per use).
        results: One `values.pack_blob` frame.
        left_out: Steps that it went without, on all ranks, since they make the loss not finite: of this update's
            fragments, or of those of one before it that lay in a buffer.
    """

    update_id: int
    attempt: int
    trained: bool
    num_trained_steps: int
    results: Buffer = b""
    left_out: tuple[FragmentRange, ...] = ()


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Rank 0 snapshot its weights: a sealed publication frame."""

    generation: int
    version: int
    frame: Buffer


# ------------------------------------------------------------------ instructions


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message. `frames` gives its encoding.

    Attributes:
        peer: Routing id on the broker's ROUTER; b"" on a DEALER.
        whole: The message's frames if they are encoded already (fragments are).
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
    """Write a fragment's frames away: learners died with it, or it is malformed."""

    fragment: FragmentId
    reason: str
    frames: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class JournalAppend:
    """Write a record; then JournalSynced, in order, soon: several are synced together.

    Attributes:
        number: Rises by one per record.
        segment: The file that it belongs to; rises.
        kind, parts: Its content.
    """

    number: int
    segment: int
    kind: int
    parts: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class JournalRemove:
    """Remove this run's segments below this number, and those of its earlier brokers."""

    before: int


@dataclass(frozen=True, slots=True)
class StartLease:
    """Sample so many vector steps, fewer after `max_s` (0: exactly); then FragmentSampled or LeaseFailed.
    One at a time."""

    lease_id: int
    update_id: int
    num_vector_steps: int
    generation: int
    weights_version: int
    connector_version: int
    max_s: float = 0.0
    by_env: bool = False


@dataclass(frozen=True, slots=True)
class ApplyWeights:
    """Load these weights; comes only between leases. The digest was checked."""

    header: Publication
    body: Buffer


@dataclass(frozen=True, slots=True)
class ApplyConnectorState:
    """Set this connector state (one `values.pack_blob` frame); comes only between leases."""

    version: int
    blob: Buffer


@dataclass(frozen=True, slots=True)
class DecodeShard:
    """Decode and check a fragment (`fragments.decode_fragment`) and cut the range out of it; then
    ShardDecoded or ShardFailed. Keep it under (update_id, attempt, index)."""

    update_id: int
    attempt: int
    index: int
    fragment: FragmentId
    first: int
    num_steps: int
    frames: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """Train on the decoded shards of (update_id, attempt), in order of index; then UpdateTrained."""

    update_id: int
    attempt: int
    num_fragments: int
    num_env_steps: int
    num_env_steps_all_ranks: int


@dataclass(frozen=True, slots=True)
class DropShards:
    """Forget what was decoded for this update under this attempt."""

    update_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Report:
    """An update was committed: once per update, in order.

    Attributes:
        fragments: What is reported for the first time: id, env steps, meta blob.
        results: One blob per learner rank.
        watermarks: Committed watermark per (runner uuid, incarnation), of those whose moved.
        forgotten: Runners that will not come back: (uuid, incarnation).
    """

    report: UpdateReport
    fragments: Sequence[tuple[FragmentId, int, Buffer]]
    results: Sequence[Buffer]
    watermarks: dict[tuple[str, int], int]
    forgotten: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """For the driver's supervisor or log."""

    message: Notice | Progress | Welcome


@dataclass(frozen=True, slots=True)
class Stop:
    """The role ends: refused, fenced, told goodbye, or left."""

    reason: str
    detail: str = ""


Instruction: TypeAlias = (
    Send
    | Publish
    | Quarantine
    | JournalAppend
    | JournalRemove
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
