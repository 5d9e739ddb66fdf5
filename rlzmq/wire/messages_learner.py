"""Messages between learners and the broker, and messages that carry weights and connector states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlzmq.wire.kinds import Kind, WireMessage
from rlzmq.wire.schema import FragmentId

__all__ = [
    "ConnectorState",
    "Shard",
    "ShardPlan",
    "ShardReady",
    "ShardRefused",
    "Snapshot",
    "SnapshotRequest",
    "Train",
    "UpdateCommitted",
    "UpdateDone",
    "Weights",
]


@dataclass(frozen=True, slots=True)
class ShardPlan(WireMessage):
    """Announcement of a rank's shard of an update. Payload: (none).

    Attributes:
        attempt: Increases when an update is planned again; lower attempts are void.
        num_fragments: Number of SHARD messages that make up this rank's shard.
        num_env_steps: Env steps of the shard.
        num_env_steps_all_ranks: Env steps of the whole update.
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

    Payload: the runner's FRAGMENT message, untouched, or the one of this range (`fragment_message.slice_fragment`).

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
    """Order to train an update in its turn, sent once every rank is ready. The plan is now fixed within the
    generation.

    Payload: two frames, `ranges.pack_ranges` of the update's fragments over all ranks, so that every
    learner remembers which steps the update consumed.
    """

    kind: ClassVar[Kind] = Kind.TRAIN
    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int
    num_env_steps: int


@dataclass(frozen=True, slots=True)
class UpdateDone(WireMessage):
    """The group agreed and this rank applied the update (or, with ``trained`` False, all ranks skipped it
    as non-finite). Sent again until UPDATE_COMMITTED.

    Payload: one frame, the `values.pack_blob` of the update's results, then the two frames of TRAIN; optionally two
    more, packed likewise, with the steps left out because they made the loss non-finite (they may be from earlier
    updates, if the ranks have a replay buffer).
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
    """All ranks have trained the update and the driver has its report.

    Payload: two frames, `ranges.pack_ranges` with the first sequence number that each runner still
    holds (steps 0): the learner may forget earlier fragments.
    """

    kind: ClassVar[Kind] = Kind.UPDATE_COMMITTED
    update_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class Weights(WireMessage):
    """Rank 0's new weights. Payload: one frame, a publication (`weights.seal_publication`)."""

    kind: ClassVar[Kind] = Kind.WEIGHTS
    generation: int
    version: int


@dataclass(frozen=True, slots=True)
class SnapshotRequest(WireMessage):
    """Request of weights newer than these, by a runner to the broker or by the broker to rank 0.

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
