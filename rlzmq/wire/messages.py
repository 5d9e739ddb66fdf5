"""All messages of the data plane, between the broker's ROUTER and runners, learners and the driver.

Each message is a frozen dataclass, the typed header. Large data follows in *payload* frames, which each docstring
describes. `encode_message` and `decode_message` convert a message and its payload to frames and back. Unknown kinds and
fields are refused.

Update ``u`` starts from weights version ``u`` and produces version ``u + 1``, so an update's id is also the weights
version that it starts from. Sequence numbers are sent as *spans*: ``(first, last)``, both included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from rlzmq.wire.codec import (
    MESSAGES,
    Buffer,
    FragmentId,
    SchemaError,
    Spans,
    WireMessage,
    checked_view,
    decode_head,
    encode_opaque,
    from_header,
    message,
    to_header,
    wire_decoder,
)

__all__ = [
    "Accepted",
    "BrokerBeat",
    "CommitReport",
    "Committed",
    "Config",
    "ConfigRequest",
    "ConnectorState",
    "DriverState",
    "Fragment",
    "Goodbye",
    "Hello",
    "LearnerState",
    "Lease",
    "LeaseReturned",
    "Notice",
    "OpenUpdate",
    "Progress",
    "Refused",
    "Rejected",
    "Reset",
    "RunnerState",
    "Shard",
    "ShardPlan",
    "ShardReady",
    "ShardRefused",
    "Snapshot",
    "SnapshotRequest",
    "Status",
    "StatusRequest",
    "TraceEvents",
    "Train",
    "UpdateCommitted",
    "UpdateDone",
    "Weights",
    "Welcome",
    "decode_message",
    "encode_message",
]


# ------------------------------------------------------------------ registration and heartbeats: every peer


@message(1)
class Hello(WireMessage):
    """Registration of a peer, repeated to a restarted broker and whenever the sender's group changes.

    Payload: a learner adds `payloads.pack_ranges` (two frames) of the ranges that it remembers as trained, then of each
    of ``training_updates``. The driver adds `pack_ranges` of the watermarks below which it has reports.

    Attributes:
        role: ``"runner"``, ``"learner"``, ``"driver"`` or ``"observer"``.
        name: The logical name, e.g. ``"runner-3"``, which a restarted process keeps.
        uuid: Id of this process.
        hello_id: Number of this process's HELLO, from 1. WELCOME repeats it, and answers to older HELLOs are ignored.
        incarnation: The requested incarnation: the supervisor's restart count, or the one from an earlier
            WELCOME; 0: the broker decides.
        run_id, package_version, spaces_digest: Must equal the broker's; "" = unchecked.
        generation: For a learner: that of its process group. For the driver: that of its last RESET. Otherwise -1.
        lineage: For a learner: generation of the RESET from which its state derives; -1: none.
        rank, num_ranks: For a learner: its rank and the group's size; -1 for other roles.
        next_update: For a learner: first update that it has not committed. For the driver: first one without a report.
        training_updates, training_attempts: For a learner: updates whose TRAIN has arrived and that are not done.
        num_envs: For a runner: env steps per vector step.
        replaces: For a runner: uuid of the previous process of its name, known only to the launcher of both; "" for
            none.
        first_unacked, next_seq: For a runner: its fragments are within [first_unacked, next_seq).
        trained, dropped: For the driver: env steps accounted for in earlier reports.
    """

    role: str
    name: str
    uuid: str
    hello_id: int = 1
    incarnation: int = 0
    run_id: str = ""
    package_version: str = ""
    spaces_digest: str = ""
    generation: int = -1
    rank: int = -1
    num_ranks: int = -1
    next_update: int = 0
    training_updates: tuple[int, ...] = ()
    training_attempts: tuple[int, ...] = ()
    lineage: int = -1
    num_envs: int = 0
    first_unacked: int = 0
    next_seq: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    replaces: str = ""


@message(2)
class Welcome(WireMessage):
    """Answer to HELLO. Payload: (none).

    Attributes:
        broker_incarnation: A new value means that the broker was restarted and has lost its state.
        incarnation: The incarnation that the peer uses in its fragments from now on.
        heartbeat_s: Interval at which the peer reports its state.
    """

    run_id: str
    hello_id: int
    broker_incarnation: int
    incarnation: int
    heartbeat_s: float


@message(3)
class Refused(WireMessage):
    """Refusal of a peer: ``reason`` is a code, ``detail`` names both values. Payload: (none).

    ``reason == "unknown_peer"`` only requests a new HELLO (the broker restarted).

    Attributes:
        generation: Generation of the refused HELLO: a learner ignores the refusal of an older one.
    """

    reason: str
    detail: str
    generation: int = -1


@message(4, "runner learner driver observer")
class Goodbye(WireMessage):
    """Orderly end of a connection, sent by either side. Payload: (none)."""

    reason: str


@message(5)
class BrokerBeat(WireMessage):
    """The broker's heartbeat, sent every heartbeat_s to every peer. Payload: (none)."""

    broker_incarnation: int


@message(6, "runner")
class RunnerState(WireMessage):
    """State of a runner, sent every heartbeat_s. Leases that it does not list were lost.

    Payload: (none).

    Attributes:
        leases: Ids of leases received and not yet answered by a fragment.
        unaccepted: Sequence numbers sent but not accepted yet.
        is_sampling: Whether a lease is being sampled. If not, the runner is idle or waits for weights.
        progress: Increases while sampling.
        pace_s: The longest recent time between two vector steps, or 0.
    """

    first_unacked: int
    unaccepted: Spans
    leases: tuple[int, ...]
    is_sampling: bool
    connector_version: int
    progress: int
    pace_s: float = 0.0


@message(7, "learner")
class LearnerState(WireMessage):
    """State of a learner rank, sent every heartbeat_s. Payload: (none).

    Attributes:
        next_update: First update not trained.
        update_ids, attempts, num_held, phases: One entry per received update. Phases: 0 receiving, 1 ready, 2 training.
        progress: Increases while training.
        patience_s: Seconds without progress after which the rank hangs, and ends by itself.
    """

    generation: int
    next_update: int
    update_ids: tuple[int, ...]
    attempts: tuple[int, ...]
    num_held: tuple[int, ...]
    phases: tuple[int, ...]
    progress: int
    patience_s: float = 0.0


@message(8, "driver")
class DriverState(WireMessage):
    """State of the driver, sent every heartbeat_s and after each report. Payload: (none).

    Attributes:
        min_generation: Generation of the driver's last RESET. The state of another lineage is ignored.
        next_report: First update without a report. Earlier reports need not be kept.
        bottleneck: What limited the newest iteration, for observers; "" if unknown.
    """

    min_generation: int
    next_report: int
    bottleneck: str = ""


@message(10, "runner learner")
class TraceEvents(WireMessage):
    """Stages of a process on another host than the driver, for the run's trace; the broker forwards it to the driver.

    Payload: one `payloads.pack_blob` frame: the result of `trace.take_events`.

    Attributes:
        source: Id of the sender's process; the broker fills it in.
    """

    source: str = ""


# ------------------------------------------------------------------ the driver, observers


@message(64, "driver")
class OpenUpdate(WireMessage):
    """Request of one update. Several may be open; they run in order. Payload: (none).

    Attributes:
        steps_per_rank, num_ranks: Their product is the batch, even after the group has shrunk.
        weights_version: The version that the update starts from (= update_id).
        staleness: S. 0 samples with exactly that version; S >= 1 lets runners sample S batches ahead.
        max_policy_lag: Fragments older than this many versions are dropped; -1: never (off-policy).
        connector_version: Minimum connector state of runners; -1 if there is none. `DriverCore` fills it in.
        fragment_length: Vector steps of a full lease.
        lease_timeout_s: Time without progress after which a lease's steps may be granted to another runner.
        keeps_episodes: Whether all chunks of an episode go to the same rank while the group is unchanged. The
            ranks' shares then differ.
        min_generation: Generation of the driver's last RESET. `DriverCore` fills it in.
    """

    update_id: int
    steps_per_rank: int
    num_ranks: int
    weights_version: int
    staleness: int = 0
    max_policy_lag: int = -1
    connector_version: int = -1
    fragment_length: int = 50
    lease_timeout_s: float = 30.0
    keeps_episodes: bool = False
    min_generation: int = -1


@message(65)
class CommitReport(WireMessage):
    """Report of a committed update, repeated until DRIVER_STATE.next_report passes it.

    Payload: six frames. `payloads.pack_ranges` of the fragments reported for the first time (first =
    0, num_steps = their env steps), `payloads.join_frames` of their metas in that order, `join_frames`
    of the ranks' results in order of rank, `pack_ranges` of the committed watermarks that moved since
    the last report (num_steps = 1 marks a runner that is gone for good).

    Attributes:
        min_generation: Generation of the last RESET that the broker received, which is the lineage of the report.
        num_env_steps: Env steps of the batch.
        num_kept_steps: `num_env_steps` without those left out as non-finite, from this batch or from earlier batches
            in replay buffers; may be negative.
        num_trained_steps: Number of steps trained by all ranks, counting repetitions.
        trained, dropped: Env steps over the lifetimes of this and earlier brokers.
        versions: Weights versions with which the batch was sampled, ascending, as far as its fragments are known.
        version_steps: Env steps sampled with each of them.
        sampling_s: Time from OPEN_UPDATE until the batch was complete.
        training_s: Time from then to the commit.
    """

    broker_incarnation: int
    min_generation: int
    update_id: int
    generation: int
    num_env_steps: int
    num_kept_steps: int
    num_trained_steps: int
    trained: int
    dropped: dict[str, int]
    versions: tuple[int, ...]
    version_steps: tuple[int, ...]
    sampling_s: float = 0.0
    training_s: float = 0.0


@message(66)
class Progress(WireMessage):
    """What the broker has of the driver, and whether it moves; sent every heartbeat_s. Payload: (none).

    Attributes:
        next_open: First update that the broker lacks. The driver repeats its requests from there.
        connector_version, min_generation: Those of the last CONNECTOR_STATE and RESET received.
        num_moves: Increases with any progress of the next update: env steps while it is collected, rank steps while
            it is trained.
        patience_s: How long a peer at work on the update may make no progress before it counts as hung.
    """

    next_open: int
    connector_version: int
    min_generation: int
    num_moves: int = 0
    patience_s: float = 0.0


@message(67)
class Notice(WireMessage):
    """An event for the supervisor: a peer joined, left, hangs, or sent bad data. Payload: (none).

    Attributes:
        event: ``joined``, ``left``, ``lost``, ``fenced``, ``lease_expired``, ``hung``, ``silent``,
            ``bad_fragment``, ``quarantined``, ``refused``, ``protocol_error``.
    """

    event: str
    role: str
    name: str
    detail: str


@message(70, "driver")
class Reset(WireMessage):
    """Start of a new lineage after the learners restored a checkpoint. Payload: (none).

    Pending fragments are dropped ("rolled_back"), open updates are discarded, weights and fragments of
    generations below ``generation`` are fenced.
    """

    generation: int
    next_update: int


@message(71, "driver")
class Config(WireMessage):
    """The run's configuration for peers that join by themselves. Payload: one opaque frame."""

    run_id: str


@message(72)
class ConfigRequest(WireMessage):
    """Request of CONFIG; allowed before HELLO. Payload: (none)."""


@message(73, "runner learner driver observer")
class StatusRequest(WireMessage):
    """Request of STATUS. Payload: (none)."""


@message(74)
class Status(WireMessage):
    """The result of `BrokerCore.status`. Payload: one `payloads.pack_blob` frame."""


# ------------------------------------------------------------------ runners: leases, fragments, acknowledgements


@message(16)
class Lease(WireMessage):
    """Permission to sample. Payload: (none).

    Attributes:
        num_vector_steps: Number of steps of the runner's vector env, unless `max_s` ends the lease.
        generation, weights_version: Minimum weights; exactly this version if ``exact``.
        connector_version: Minimum connector state; -1 if there is none.
        timeout_s: Time without progress after which the broker may grant the steps to another runner.
        accepted: Sequence numbers accepted since the last message to this runner.
        max_s: Number of seconds after which the sampled data must be delivered; 0: no limit.
        is_sorted_by_env: Whether the fragment must order its chunks by environment and fill in `env_steps`.
    """

    lease_id: int
    num_vector_steps: int
    generation: int
    weights_version: int
    exact: bool
    connector_version: int
    timeout_s: float
    accepted: Spans = ()
    max_s: float = 0.0
    is_sorted_by_env: bool = False


@message(17, "runner")
class LeaseReturned(WireMessage):
    """A lease that the runner will not fulfil, e.g. because its weights are newer. Payload: (none)."""

    lease_id: int
    reason: str


@message(18, "runner")
class Fragment(WireMessage):
    """Sampled steps, encoded with array specs (`payloads.encode_fragment`).

    Payload: one frame per column array of ``EpisodeBatch.to_wire()``, then one uint8 frame, the
    `payloads.pack_blob` of its meta (episode metrics, connector delta).

    Attributes:
        num_env_steps: Number of trainable steps (autoreset steps do not count).
        weights_version: The oldest version used for any of its actions.
        batch: The header of ``EpisodeBatch.to_wire()``.
        env_steps: Env steps of each environment, in order, if the lease asks for them.
        busy_s: How long the runner sampled, and sampled what it was asked for before: the rest of the lease's time
            was needed by messages, weights and data on their way.
    """

    runner: str
    incarnation: int
    seq: int
    lease_id: int
    num_env_steps: int
    generation: int
    weights_version: int
    batch: dict[str, Any]
    env_steps: tuple[int, ...] = ()
    busy_s: float = 0.0

    @property
    def fragment_id(self) -> FragmentId:
        """The fragment's id within the run."""
        return FragmentId(self.runner, self.incarnation, self.seq)


@message(19)
class Accepted(WireMessage):
    """Fragments that are in the broker's ledger. The runner keeps them until COMMITTED. Payload: (none)."""

    incarnation: int
    accepted: Spans


@message(20)
class Committed(WireMessage):
    """Fragments that were trained, or dropped with a reason. The runner forgets them. Payload: (none).

    Attributes:
        watermark: All sequence numbers below it are committed.
        committed: Further committed sequence numbers.
    """

    incarnation: int
    watermark: int
    committed: Spans


@message(21)
class Rejected(WireMessage):
    """Refusal of a fragment, or of another message (then ``seq`` is -1). Payload: (none)."""

    seq: int
    reason: str
    detail: str


# ------------------------------------------------------------------ learners; weights and connector states


@message(32)
class ShardPlan(WireMessage):
    """Announcement of a rank's shard of an update. Payload: (none).

    Attributes:
        attempt: Increases when an update is planned again; lower attempts are void.
        num_fragments: Number of SHARD messages that make up this rank's shard.
        num_env_steps: Env steps of the shard.
        num_env_steps_all_ranks: Env steps of the whole update.
    """

    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int
    num_fragments: int
    num_env_steps: int
    num_env_steps_all_ranks: int


@message(33)
class Shard(WireMessage):
    """One fragment, or a range of its steps, for one rank.

    Payload: the runner's unchanged FRAGMENT message, or that of this range (`payloads.slice_fragment`).

    Attributes:
        index: 0 … num_fragments-1, the order of training data.
        first, num_steps: The range of the fragment's env steps, in chunk order.
    """

    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int
    index: int
    fragment: FragmentId
    first: int
    num_steps: int


@message(34, "learner")
class ShardReady(WireMessage):
    """This rank has decoded its whole shard. Payload: (none)."""

    update_id: int
    attempt: int
    generation: int
    rank: int


@message(35, "learner")
class ShardRefused(WireMessage):
    """This rank cannot use a fragment (malformed, not finite, wrong shape). Payload: (none)."""

    update_id: int
    attempt: int
    generation: int
    fragment: FragmentId
    reason: str
    detail: str


@message(36)
class Train(WireMessage):
    """Order to train an update in its turn, sent once every rank is ready.

    From now on the plan is fixed within the generation.

    Payload: two frames, `payloads.pack_ranges` of the update's fragments over all ranks, so that every
    learner remembers which steps the update consumed.
    """

    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int


@message(37, "learner")
class UpdateDone(WireMessage):
    """Confirmation that the group agreed and this rank applied the update; repeated until UPDATE_COMMITTED.

    With ``trained`` False, all ranks skipped the update as non-finite.

    Payload: one frame, the `payloads.pack_blob` of the update's results, then the two frames of TRAIN.

    The generation is that of the current group, the rank that in the group that trained it. ``num_trained_steps``
    counts the env steps that all ranks trained, with repetitions.
    """

    update_id: int
    attempt: int
    generation: int
    rank: int
    trained: bool
    num_trained_steps: int


@message(38)
class UpdateCommitted(WireMessage):
    """All ranks have trained the update and the driver has its report.

    Payload: two frames, `payloads.pack_ranges` with the first sequence number that each runner still
    holds (steps 0): the learner may forget earlier fragments.
    """

    update_id: int
    generation: int


@message(48, "learner")
class Weights(WireMessage):
    """Rank 0's new weights. Payload: one frame, a publication (`weights.seal_publication`)."""

    generation: int
    version: int


@message(49, "runner")
class SnapshotRequest(WireMessage):
    """Request of weights newer than these, by a runner to the broker or by the broker to rank 0.

    Payload: (none).
    """

    generation: int
    version: int
    connector_version: int = -1


@message(50)
class Snapshot(WireMessage):
    """The latest weights for one runner. Payload: one frame, a publication, as on PUB."""


@message(52, "driver")
class ConnectorState(WireMessage):
    """The merged connector state, driver → broker → runners. Payload: one `payloads.pack_blob` frame."""

    version: int


def encode_message(message: WireMessage, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the frames of a message. The payload frames are unchanged."""
    return encode_opaque(message.kind, to_header(message), payload)


@wire_decoder
def decode_message(frames: Sequence[Buffer]) -> tuple[WireMessage, tuple[Buffer, ...]]:
    """Return the message and its payload frames. Array specs are checked, but no arrays are created.

    Raises:
        WireError: It is not a message of this protocol version, or its header does not match its kind.
    """
    head = decode_head(frames)
    cls = MESSAGES.get(head.kind)
    if cls is None:
        raise SchemaError(f"message kind {head.kind} is unknown here")
    if (head.specs is None) == (cls is Fragment):
        raise SchemaError(
            f"{cls.__name__}: array specs {'missing' if head.specs is None else 'not expected'}"
        )
    for position, (dtype, shape) in enumerate(head.specs or ()):
        checked_view(frames[position + 1], dtype, shape, position)
    return from_header(cls, head.header), tuple(frames[1:])
