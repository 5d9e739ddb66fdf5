"""Messages between the driver (or an observer) and the broker."""

from __future__ import annotations

from rlzmq.wire.schema import WireMessage, message

__all__ = [
    "Config",
    "ConfigRequest",
    "Notice",
    "OpenUpdate",
    "Pause",
    "Progress",
    "Reset",
    "Resume",
    "Status",
    "StatusRequest",
    "UpdateReport",
]


@message(64, "driver")
class OpenUpdate(WireMessage):
    """Request of one update. Several may be open; they run in order. Payload: (none).

    Attributes:
        steps_per_rank, num_ranks: Their product is the batch, even after the group has shrunk.
        weights_version: The version that the update starts from (= update_id).
        staleness: S. 0 samples with exactly that version; S >= 1 lets runners sample S batches ahead.
        max_policy_lag: Fragments older than this many versions are dropped; -1: never (off-policy).
        connector_version: Minimum connector state of runners; -1 if there is none.
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
class UpdateReport(WireMessage):
    """Report of a committed update, repeated until DRIVER_STATE.next_report passes it.

    Payload: eight frames. `ranges.pack_ranges` of the fragments reported for the first time (first =
    0, num_steps = their env steps), `ranges.pack_blobs` of their metas in that order, `pack_blobs`
    of the ranks' results in order of rank, `pack_ranges` of the committed watermarks that moved since
    the last report (num_steps = 1 marks a runner that is gone for good).

    Attributes:
        min_generation: Generation of the last RESET that the broker received, which is the lineage of the report.
        num_env_steps: Env steps of the batch.
        num_kept_steps: `num_env_steps` without those left out as non-finite, from this batch or from earlier batches
            in replay buffers; may be negative.
        num_trained_steps: Number of steps trained by all ranks, counting repetitions.
        accounting, dropped: Env steps over the lifetimes of this and earlier brokers.
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
    accounting: dict[str, int]
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
        is_paused: Whether the broker is paused.
        num_moves: Increases with any progress of the next update: env steps while it is collected, rank steps while
            it is trained.
        patience_s: How long a peer at work on the update may make no progress before it counts as hung.
    """

    next_open: int
    connector_version: int
    min_generation: int
    is_paused: bool = False
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


@message(68, "driver")
class Pause(WireMessage):
    """Stop granting leases. Payload: (none)."""


@message(69, "driver")
class Resume(WireMessage):
    """Grant leases again. Payload: (none)."""


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
    config_digest: str


@message(72)
class ConfigRequest(WireMessage):
    """Request of CONFIG; allowed before HELLO. Payload: (none)."""


@message(73, "runner learner driver observer")
class StatusRequest(WireMessage):
    """Request of STATUS. Payload: (none)."""


@message(74)
class Status(WireMessage):
    """The result of `BrokerCore.status`. Payload: one `values.pack_blob` frame."""
