"""Every message of the data plane: runners, learners and the driver around the broker's one ROUTER.

Each message is a frozen dataclass: the typed header. What is large travels behind it as *payload*
frames, named in each docstring; ``(none)`` where there are none. `encode_message` and
`decode_message` turn a message and its payload into frames and back; unknown kinds and fields are
refused.

Counters: update ``u`` starts from weights version ``u`` and makes version ``u + 1``, so "update id"
and "the weights version it starts from" are the same number. Sequence numbers come in *spans*:
``(first, last)``, both included.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from rlzmq.protocol.codec import Buffer, Head, decode_head, encode_opaque
from rlzmq.protocol.errors import ArrayMismatchError, SchemaError
from rlzmq.protocol.schema import FragmentId, from_header, to_header

__all__ = [
    "MESSAGES",
    "Accepted",
    "BrokerBeat",
    "Committed",
    "Config",
    "ConfigRequest",
    "ConnectorState",
    "DriverState",
    "Fragment",
    "FragmentId",
    "Goodbye",
    "Hello",
    "Kind",
    "LearnerState",
    "Lease",
    "LeaseReturned",
    "Notice",
    "OpenUpdate",
    "Pause",
    "Progress",
    "Refused",
    "Rejected",
    "Reset",
    "Resume",
    "RunnerState",
    "Shard",
    "ShardPlan",
    "ShardReady",
    "ShardRefused",
    "Snapshot",
    "SnapshotRequest",
    "Spans",
    "Status",
    "StatusRequest",
    "Train",
    "UpdateCommitted",
    "UpdateDone",
    "UpdateReport",
    "Weights",
    "WireMessage",
    "decode_message",
    "encode_message",
    "first_number",
    "message_from_head",
]

Spans: TypeAlias = tuple[tuple[int, int], ...]


class Kind(enum.IntEnum):
    """The second byte of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    GOODBYE = 4
    BROKER_BEAT = 5
    RUNNER_STATE = 6
    LEARNER_STATE = 7
    DRIVER_STATE = 8
    LEASE = 16
    LEASE_RETURNED = 17
    FRAGMENT = 18
    ACCEPTED = 19
    COMMITTED = 20
    REJECTED = 21
    SHARD_PLAN = 32
    SHARD = 33
    SHARD_READY = 34
    SHARD_REFUSED = 35
    TRAIN = 36
    UPDATE_DONE = 37
    UPDATE_COMMITTED = 38
    WEIGHTS = 48
    SNAPSHOT_REQUEST = 49
    SNAPSHOT = 50
    PUBLICATION = 51  # on PUB only, see rlzmq.protocol.weights
    CONNECTOR_STATE = 52
    OPEN_UPDATE = 64
    UPDATE_REPORT = 65
    PROGRESS = 66
    NOTICE = 67
    PAUSE = 68
    RESUME = 69
    RESET = 70
    CONFIG = 71
    CONFIG_REQUEST = 72
    STATUS_REQUEST = 73
    STATUS = 74


# Attempts and lease ids never repeat across restarts of the broker: its incarnation (which must
# rise, e.g. milliseconds of its start) stands above these bits.
_COUNTER_BITS = 20


def first_number(broker_incarnation: int) -> int:
    """The first attempt number and lease id of a broker incarnation (< 2**42)."""
    return (broker_incarnation << _COUNTER_BITS) + 1


class WireMessage:
    """Base of the message dataclasses: gives them their kind."""

    __slots__ = ()
    kind: ClassVar[Kind]


# ------------------------------------------------------------------ everyone


@dataclass(frozen=True, slots=True)
class Hello(WireMessage):
    """Registers a peer; sent again to a restarted broker and whenever the sender's group changes.

    Payload: a learner adds `ranges.pack_ranges` (two frames) of what it trained lately, then of each
    of ``training_updates``.

    Attributes:
        role: ``"runner"``, ``"learner"``, ``"driver"`` or ``"observer"``.
        name: The logical place, e.g. ``"runner-3"``; a restarted process keeps it.
        uuid: Of this process.
        hello_id: Counts this process's HELLOs, from 1. WELCOME repeats it: only the answer to the
            newest one counts, and an older one that comes late is ignored.
        incarnation: The one asked for: the supervisor's restart count, or what an earlier WELCOME
            gave; 0 for "give me one".
        run_id, package_version, config_digest, spaces_digest: Must equal the broker's; "" = unchecked.
        generation: Of a learner's process group; of the driver's last RESET; else -1.
        rank, num_ranks: Of a learner; -1 for other roles.
        next_update: Learner: first update it has not committed. Driver: first without a report.
        training_updates, training_attempts: Of a learner: what it got TRAIN for and has not done.
        num_envs: Of a runner: env steps per vector step.
        first_unacked, next_seq: Of a runner: what it still holds is within [first_unacked, next_seq).
        trained, dropped: Of the driver: env steps accounted for in earlier reports.
    """

    kind: ClassVar[Kind] = Kind.HELLO
    role: str
    name: str
    uuid: str
    hello_id: int = 1
    incarnation: int = 0
    run_id: str = ""
    package_version: str = ""
    config_digest: str = ""
    spaces_digest: str = ""
    generation: int = -1
    rank: int = -1
    num_ranks: int = -1
    next_update: int = 0
    training_updates: tuple[int, ...] = ()
    training_attempts: tuple[int, ...] = ()
    num_envs: int = 0
    first_unacked: int = 0
    next_seq: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Welcome(WireMessage):
    """Answer to HELLO. Payload: (none).

    Attributes:
        broker_incarnation: Another one than before means a restarted broker: re-send what it lost.
        incarnation: What the peer stamps its fragments with from now on.
        heartbeat_s: How often the peer reports its state.
    """

    kind: ClassVar[Kind] = Kind.WELCOME
    run_id: str
    hello_id: int
    broker_incarnation: int
    incarnation: int
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Refused(WireMessage):
    """The peer is not served: ``reason`` is a code, ``detail`` says both values. Payload: (none).

    ``reason == "unknown_peer"`` only asks for a new HELLO (the broker restarted).

    Attributes:
        generation: Of the HELLO that is refused: a learner ignores the refusal of an older one.
    """

    kind: ClassVar[Kind] = Kind.REFUSED
    reason: str
    detail: str
    generation: int = -1


@dataclass(frozen=True, slots=True)
class Goodbye(WireMessage):
    """An orderly leave, either way. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.GOODBYE
    reason: str


@dataclass(frozen=True, slots=True)
class BrokerBeat(WireMessage):
    """The broker lives; sent every heartbeat_s to every peer. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.BROKER_BEAT
    broker_incarnation: int


@dataclass(frozen=True, slots=True)
class RunnerState(WireMessage):
    """What a runner holds, every heartbeat_s; whatever the broker thinks beyond it was lost.

    Payload: (none).

    Attributes:
        leases: Ids of leases received and not yet answered by a fragment.
        unaccepted: Sequence numbers sent and not yet accepted.
        is_sampling: Whether one of them is at work; else the runner is idle or waits for weights.
        progress: Rises while sampling: a sampling runner whose progress stands still hangs.
    """

    kind: ClassVar[Kind] = Kind.RUNNER_STATE
    first_unacked: int
    next_seq: int
    unaccepted: Spans
    leases: tuple[int, ...]
    is_sampling: bool
    generation: int
    weights_version: int
    connector_version: int
    progress: int
    num_env_steps_sampled: int


@dataclass(frozen=True, slots=True)
class LearnerState(WireMessage):
    """What a learner rank holds, every heartbeat_s. Payload: (none).

    Attributes:
        next_update: First update not trained.
        update_ids, attempts, num_held, phases: One entry per update at hand; phase 0 receiving,
            1 ready, 2 training.
    """

    kind: ClassVar[Kind] = Kind.LEARNER_STATE
    generation: int
    next_update: int
    update_ids: tuple[int, ...]
    attempts: tuple[int, ...]
    num_held: tuple[int, ...]
    phases: tuple[int, ...]
    progress: int


@dataclass(frozen=True, slots=True)
class DriverState(WireMessage):
    """Every heartbeat_s and after each report. Payload: (none).

    Attributes:
        min_generation: Of the driver's last RESET: a state of another lineage is ignored.
        next_report: First update without a report here; earlier reports need not be kept.
    """

    kind: ClassVar[Kind] = Kind.DRIVER_STATE
    min_generation: int
    next_report: int


# ------------------------------------------------------------------ runners


@dataclass(frozen=True, slots=True)
class Lease(WireMessage):
    """Permission to sample. Payload: (none).

    Attributes:
        update_id: The update it is for; -1 when the data may go to any (staleness >= 1).
        num_vector_steps: Exactly so many steps of the runner's vector env.
        generation, weights_version: At least these weights; exactly this version if ``exact``.
        connector_version: At least this connector state; -1 if there is none.
        timeout_s: After this the broker grants the steps to someone else.
        accepted: Sequence numbers accepted since the last message to this runner.
    """

    kind: ClassVar[Kind] = Kind.LEASE
    lease_id: int
    update_id: int
    num_vector_steps: int
    generation: int
    weights_version: int
    exact: bool
    connector_version: int
    timeout_s: float
    accepted: Spans = ()


@dataclass(frozen=True, slots=True)
class LeaseReturned(WireMessage):
    """A lease that the runner will not fulfil, e.g. its weights are already newer. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.LEASE_RETURNED
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fragment(WireMessage):
    """Sampled steps. Encoded with array specs (`fragments.encode_fragment`).

    Payload: one frame per column array of ``EpisodeBatch.to_wire()``, then one uint8 frame, the
    `values.pack_blob` of its meta (episode metrics, connector delta).

    Attributes:
        num_env_steps: Steps in it that can be trained (autoreset steps do not count).
        weights_version: The oldest version used for any of its actions.
        batch: The header of ``EpisodeBatch.to_wire()``.
    """

    kind: ClassVar[Kind] = Kind.FRAGMENT
    runner: str
    incarnation: int
    seq: int
    lease_id: int
    num_env_steps: int
    generation: int
    weights_version: int
    connector_version: int
    batch: dict[str, Any]

    @property
    def fragment_id(self) -> FragmentId:
        """The id within the run."""
        return FragmentId(self.runner, self.incarnation, self.seq)


@dataclass(frozen=True, slots=True)
class Accepted(WireMessage):
    """These are in the broker's ledger; the runner keeps them until COMMITTED. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.ACCEPTED
    incarnation: int
    accepted: Spans


@dataclass(frozen=True, slots=True)
class Committed(WireMessage):
    """These are trained, or dropped with a reason: the runner forgets them. Payload: (none).

    Attributes:
        watermark: Every sequence number below it is committed.
        committed: Further committed ones.
    """

    kind: ClassVar[Kind] = Kind.COMMITTED
    incarnation: int
    watermark: int
    committed: Spans


@dataclass(frozen=True, slots=True)
class Rejected(WireMessage):
    """A message that was refused; a fragment's seq, else -1. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.REJECTED
    seq: int
    reason: str
    detail: str


# ------------------------------------------------------------------ learners


@dataclass(frozen=True, slots=True)
class ShardPlan(WireMessage):
    """Announces a rank's shard of an update: what to wait for. Payload: (none).

    Attributes:
        attempt: Rises when an update is planned anew; lower attempts are void.
        num_fragments: How many SHARD messages make this rank's shard.
        num_env_steps: Exactly so many steps are in it.
        num_env_steps_all_ranks: Of the whole update.
    """

    kind: ClassVar[Kind] = Kind.SHARD_PLAN
    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int
    num_fragments: int
    num_env_steps: int
    num_env_steps_all_ranks: int


@dataclass(frozen=True, slots=True)
class Shard(WireMessage):
    """One fragment, or a range of its steps, for one rank.

    Payload: the runner's FRAGMENT message, all its frames, untouched.

    Attributes:
        index: 0 … num_fragments-1, the order of training data.
        first, num_steps: The range of the fragment's env steps, in chunk order.
    """

    kind: ClassVar[Kind] = Kind.SHARD
    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int
    index: int
    fragment: FragmentId
    first: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class ShardReady(WireMessage):
    """This rank has decoded its whole shard. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.SHARD_READY
    update_id: int
    attempt: int
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class ShardRefused(WireMessage):
    """This rank cannot use a fragment (malformed, not finite, wrong shape). Payload: (none)."""

    kind: ClassVar[Kind] = Kind.SHARD_REFUSED
    update_id: int
    attempt: int
    generation: int
    fragment: FragmentId
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Train(WireMessage):
    """Every rank is ready: train this update when its turn comes. From here on no re-planning
    within the generation.

    Payload: two frames, `ranges.pack_ranges` of all the update's fragments over all ranks, so that
    every learner remembers what the update consumed.
    """

    kind: ClassVar[Kind] = Kind.TRAIN
    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int
    num_env_steps: int


@dataclass(frozen=True, slots=True)
class UpdateDone(WireMessage):
    """The group voted and this rank stepped (or, with ``trained`` False, all ranks skipped the
    step as not finite). Sent again until UPDATE_COMMITTED.

    Payload: one frame, the `values.pack_blob` of the update's results, then the two frames of TRAIN.
    """

    kind: ClassVar[Kind] = Kind.UPDATE_DONE
    update_id: int
    attempt: int
    generation: int
    rank: int
    num_ranks: int
    trained: bool
    num_trained_steps: int


@dataclass(frozen=True, slots=True)
class UpdateCommitted(WireMessage):
    """All ranks are done with it and the driver has its report.

    Payload: two frames, `ranges.pack_ranges` with, per runner, the first sequence number it still
    holds (steps 0): what was trained before it may be forgotten.
    """

    kind: ClassVar[Kind] = Kind.UPDATE_COMMITTED
    update_id: int
    generation: int


# ------------------------------------------------------------------ weights


@dataclass(frozen=True, slots=True)
class Weights(WireMessage):
    """Rank 0's new weights. Payload: one frame, a publication (`weights.seal_publication`)."""

    kind: ClassVar[Kind] = Kind.WEIGHTS
    generation: int
    version: int


@dataclass(frozen=True, slots=True)
class SnapshotRequest(WireMessage):
    """ "Send me the latest if it is newer than this": a runner to the broker, or the broker to rank 0.

    Payload: (none).
    """

    kind: ClassVar[Kind] = Kind.SNAPSHOT_REQUEST
    generation: int
    version: int
    connector_version: int = -1


@dataclass(frozen=True, slots=True)
class Snapshot(WireMessage):
    """The latest weights for one runner. Payload: one frame, a publication, as on PUB."""

    kind: ClassVar[Kind] = Kind.SNAPSHOT
    generation: int
    version: int


@dataclass(frozen=True, slots=True)
class ConnectorState(WireMessage):
    """The merged connector state, driver → broker → runners. Payload: one `values.pack_blob` frame."""

    kind: ClassVar[Kind] = Kind.CONNECTOR_STATE
    version: int


# ------------------------------------------------------------------ driver


@dataclass(frozen=True, slots=True)
class OpenUpdate(WireMessage):
    """Asks for one update; several may be open, they run in order. Payload: (none).

    Attributes:
        steps_per_rank, num_ranks: The batch is their product, also when the group has shrunk.
        weights_version: The version the update starts from (= update_id).
        staleness: S: 0 samples under exactly that version; S >= 1 lets runners run S batches ahead.
        max_policy_lag: Fragments older than this many versions are dropped; -1: never (off-policy).
        connector_version: Runners need at least this connector state; -1 if there is none.
        fragment_length: Vector steps of a full lease.
        lease_timeout_s: After this a lease's steps are granted to someone else.
        replay_ratio: Off-policy: steps trained per step sampled (> 0 bounds sampling by what was
            trained); 0: every sampled step is trained once.
        min_generation: Of the driver's last RESET; `DriverCore` fills it in.
    """

    kind: ClassVar[Kind] = Kind.OPEN_UPDATE
    update_id: int
    steps_per_rank: int
    num_ranks: int
    weights_version: int
    staleness: int = 0
    max_policy_lag: int = -1
    connector_version: int = -1
    fragment_length: int = 50
    lease_timeout_s: float = 30.0
    replay_ratio: float = 0.0
    min_generation: int = -1


@dataclass(frozen=True, slots=True)
class UpdateReport(WireMessage):
    """An update was committed. Sent again until DRIVER_STATE.next_report passes it.

    Payload: eight frames. `ranges.pack_ranges` of the fragments reported for the first time (first =
    0, num_steps = their env steps), `ranges.pack_blobs` of their metas in that order, `pack_blobs`
    of the ranks' results in order of rank, `pack_ranges` of committed watermarks per runner.

    Attributes:
        min_generation: Of the last RESET that the broker knows: the lineage that it reports on.
        trained: False if all ranks skipped the step.
        num_env_steps: Of the batch.
        accounting, dropped: In env steps over the broker's lifetime (and what the driver had before).
    """

    kind: ClassVar[Kind] = Kind.UPDATE_REPORT
    broker_incarnation: int
    min_generation: int
    update_id: int
    generation: int
    trained: bool
    num_env_steps: int
    num_trained_steps: int
    accounting: dict[str, int]
    dropped: dict[str, int]
    oldest_version: int
    newest_version: int


@dataclass(frozen=True, slots=True)
class Progress(WireMessage):
    """Where the open update stands, every heartbeat_s. Payload: (none).

    Attributes:
        next_open: First update that was not opened here; the driver re-sends from there.
        connector_version, min_generation: Of the newest CONNECTOR_STATE and RESET that came.
    """

    kind: ClassVar[Kind] = Kind.PROGRESS
    update_id: int
    next_open: int
    connector_version: int
    min_generation: int
    num_steps_ready: int
    num_steps_leased: int
    num_runners: int
    num_learners: int
    weights_version: int
    accounting: dict[str, int]
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Notice(WireMessage):
    """Something a supervisor acts on: a peer joined, left, hangs, sent bad data. Payload: (none).

    Attributes:
        event: ``joined``, ``left``, ``lost``, ``fenced``, ``lease_expired``, ``hung``, ``bad_fragment``,
            ``quarantined``, ``refused``, ``protocol_error``.
    """

    kind: ClassVar[Kind] = Kind.NOTICE
    event: str
    role: str
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class Pause(WireMessage):
    """Grant no more leases. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.PAUSE


@dataclass(frozen=True, slots=True)
class Resume(WireMessage):
    """Grant leases again. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.RESUME


@dataclass(frozen=True, slots=True)
class Reset(WireMessage):
    """The learners restarted from a checkpoint: a new lineage begins. Payload: (none).

    Pending fragments are dropped ("rolled_back"), open updates are forgotten, weights and fragments
    of generations below ``generation`` are fenced.
    """

    kind: ClassVar[Kind] = Kind.RESET
    generation: int
    next_update: int


@dataclass(frozen=True, slots=True)
class Config(WireMessage):
    """The run's configuration for peers that join by themselves. Payload: one frame, opaque here."""

    kind: ClassVar[Kind] = Kind.CONFIG
    run_id: str
    config_digest: str


@dataclass(frozen=True, slots=True)
class ConfigRequest(WireMessage):
    """Asks for CONFIG; allowed before HELLO. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.CONFIG_REQUEST


@dataclass(frozen=True, slots=True)
class StatusRequest(WireMessage):
    """Asks for STATUS. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.STATUS_REQUEST


@dataclass(frozen=True, slots=True)
class Status(WireMessage):
    """What `BrokerCore.status` says. Payload: one `values.pack_blob` frame."""

    kind: ClassVar[Kind] = Kind.STATUS


MESSAGES: dict[int, type[WireMessage]] = {
    int(cls.kind): cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, WireMessage) and cls is not WireMessage
}


def encode_message(message: WireMessage, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of a message whose payload frames go as they are."""
    return encode_opaque(message.kind, to_header(message), payload)


def decode_message(frames: Sequence[Buffer]) -> tuple[WireMessage, tuple[Buffer, ...]]:
    """The message and its payload frames; array specs, if any, are checked but arrays not made.

    Raises:
        WireError: Not a message of this protocol version, or a header that its kind does not have.
    """
    return message_from_head(decode_head(frames), frames), tuple(frames[1:])


def message_from_head(head: Head, frames: Sequence[Buffer]) -> WireMessage:
    """The typed message of a decoded first frame; a fragment's frames are checked by their lengths."""
    cls = MESSAGES.get(head.kind)
    if cls is None:
        raise SchemaError(f"message kind {head.kind} is unknown here")
    if (head.specs is None) == (cls is Fragment):
        raise SchemaError(
            f"{cls.__name__}: array specs {'missing' if head.specs is None else 'not expected'}"
        )
    if head.specs is not None:
        for position, (dtype, shape) in enumerate(head.specs):
            num_bytes = dtype.itemsize
            for size in shape:
                num_bytes *= size
            length = memoryview(frames[position + 1]).nbytes
            if num_bytes != length:
                raise ArrayMismatchError(
                    f"array {position}: shape {list(shape)} of {dtype.str} needs {num_bytes} bytes, "
                    f"its frame has {length}"
                )
    return from_header(cls, head.header)
