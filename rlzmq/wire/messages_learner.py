"""Messages between learners and the broker, and of weights and connector states."""

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

    Payload: one frame, the `values.pack_blob` of the update's results, then the two frames of TRAIN; two more,
    packed likewise, with the steps that the update went without on any rank, since they made the loss not finite
    (also of fragments from updates before it, where ranks keep a buffer).
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
