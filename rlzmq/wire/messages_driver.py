"""Messages between the driver (or an observer) and the broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlzmq.wire.kinds import Kind, WireMessage

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
        lease_timeout_s: After so long without progress a lease's steps may be granted to someone else.
        keeps_episodes: All chunks of an episode go to the same rank, as long as the group is the same; the batch is
            exact, a rank's part of it is not.
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
    keeps_episodes: bool = False
    min_generation: int = -1


@dataclass(frozen=True, slots=True)
class UpdateReport(WireMessage):
    """An update was committed. Sent again until DRIVER_STATE.next_report passes it.

    Payload: eight frames. `ranges.pack_ranges` of the fragments reported for the first time (first =
    0, num_steps = their env steps), `ranges.pack_blobs` of their metas in that order, `pack_blobs`
    of the ranks' results in order of rank, `pack_ranges` of the committed watermarks that moved since
    the report before (num_steps = 1: of a runner that is gone for good and forgotten).

    Attributes:
        min_generation: Of the last RESET that the broker knows: the lineage that it reports on.
        num_env_steps: Of the batch.
        num_kept_steps: Of them, less what was left out as not finite, also of batches before that learners had in a
            buffer: negative where that is more.
        num_trained_steps: Trained by all ranks, repetitions counted.
        accounting, dropped: In env steps over the broker's lifetime (and what the driver had before).
        sampling_s: From OPEN_UPDATE until the batch was complete.
        training_s: From then to the commit.
    """

    kind: ClassVar[Kind] = Kind.UPDATE_REPORT
    broker_incarnation: int
    min_generation: int
    update_id: int
    generation: int
    num_env_steps: int
    num_kept_steps: int
    num_trained_steps: int
    accounting: dict[str, int]
    dropped: dict[str, int]
    oldest_version: int
    newest_version: int
    sampling_s: float = 0.0
    training_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress(WireMessage):
    """Where the open update stands, every heartbeat_s. Payload: (none).

    Attributes:
        next_open: First update that was not opened here; the driver re-sends from there.
        connector_version, min_generation: Of the newest CONNECTOR_STATE and RESET that came.
        is_paused: Whether PAUSE came last, not RESUME.
        num_moves: Rises whenever somebody does something for the next update: an env step while it is collected,
            a rank's step while it is trained.
        patience_s: How long one of those at work may be silent without being taken for hung.
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
    is_paused: bool = False
    num_moves: int = 0
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Notice(WireMessage):
    """Something a supervisor acts on: a peer joined, left, hangs, sent bad data. Payload: (none).

    Attributes:
        event: ``joined``, ``left``, ``lost``, ``fenced``, ``lease_expired``, ``hung``, ``silent``,
            ``bad_fragment``, ``quarantined``, ``refused``, ``protocol_error``.
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
    """The run's configuration for peers that join by themselves. Payload: one frame, opaque here.

    Attributes:
        driver: Of the newest driver: its incarnation. The broker fills it in.
    """

    kind: ClassVar[Kind] = Kind.CONFIG
    run_id: str
    config_digest: str
    driver: int = 0


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
