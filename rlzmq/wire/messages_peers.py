"""Messages of registration and signs of life: every peer and the broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rlzmq.wire.kinds import Kind, Spans, WireMessage

__all__ = [
    "BrokerBeat",
    "DriverState",
    "Goodbye",
    "Hello",
    "LearnerState",
    "Refused",
    "RunnerState",
    "Welcome",
]


@dataclass(frozen=True, slots=True)
class Hello(WireMessage):
    """Registers a peer; sent again to a restarted broker and whenever the sender's group changes.

    Payload: a learner adds `ranges.pack_ranges` (two frames) of what it trained lately, then of each
    of ``training_updates``; the driver adds `pack_ranges` of the watermarks below which it has reports.

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
        lineage: Of a learner: the RESET that its state goes back to, by its generation; -1: none.
        rank, num_ranks: Of a learner; -1 for other roles.
        next_update: Learner: first update it has not committed. Driver: first without a report.
        training_updates, training_attempts: Of a learner: what it got TRAIN for and has not done.
        num_envs: Of a runner: env steps per vector step.
        replaces: Of a runner: the uuid of the process of its name before it, which only who started both knows;
            "" where there was none.
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
    lineage: int = -1
    num_envs: int = 0
    first_unacked: int = 0
    next_seq: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class Welcome(WireMessage):
    """Answer to HELLO. Payload: (none).

    Attributes:
        broker_incarnation: Another one than before means a restarted broker: re-send what it lost.
        incarnation: What the peer stamps its fragments with from now on.
        heartbeat_s: How often the peer reports its state.
        generation, connector_version, dropped: For a driver, what drivers before it have left here: the
            newest generation of learners or RESET, the newest connector state's version, and env steps
            dropped. Its own begin above them.
    """

    kind: ClassVar[Kind] = Kind.WELCOME
    run_id: str
    hello_id: int
    broker_incarnation: int
    incarnation: int
    heartbeat_s: float
    generation: int = -1
    connector_version: int = -1
    dropped: dict[str, int] = field(default_factory=dict)


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
        progress: Collectives entered in this generation; of a single rank: minibatches trained.
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
        runners, learners: Names of the driver's own processes that live and should be registered.
    """

    kind: ClassVar[Kind] = Kind.DRIVER_STATE
    min_generation: int
    next_report: int
    runners: tuple[str, ...] = ()
    learners: tuple[str, ...] = ()
