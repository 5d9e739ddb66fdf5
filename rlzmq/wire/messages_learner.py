"""Messages between learners and the broker, and messages that carry weights and connector states."""

from __future__ import annotations

from rlzmq.wire.schema import FragmentId, WireMessage, message

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

    Payload: the runner's unchanged FRAGMENT message, or that of this range (`fragment_message.slice_fragment`).

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

    Payload: two frames, `ranges.pack_ranges` of the update's fragments over all ranks, so that every
    learner remembers which steps the update consumed.
    """

    broker_incarnation: int
    update_id: int
    attempt: int
    generation: int
    num_env_steps: int


@message(37, "learner")
class UpdateDone(WireMessage):
    """Confirmation that the group agreed and this rank applied the update; repeated until UPDATE_COMMITTED.

    With ``trained`` False, all ranks skipped the update as non-finite.

    Payload: one frame, the `values.pack_blob` of the update's results, then the two frames of TRAIN.

    The generation and rank are those of the current group; ``num_ranks`` is that of the group that trained it.
    """

    update_id: int
    attempt: int
    generation: int
    rank: int
    num_ranks: int
    trained: bool
    num_trained_steps: int


@message(38)
class UpdateCommitted(WireMessage):
    """All ranks have trained the update and the driver has its report.

    Payload: two frames, `ranges.pack_ranges` with the first sequence number that each runner still
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

    generation: int
    version: int


@message(52, "driver")
class ConnectorState(WireMessage):
    """The merged connector state, driver → broker → runners. Payload: one `values.pack_blob` frame."""

    version: int
