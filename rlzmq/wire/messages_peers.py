"""Messages for registration and heartbeats, between all peers and the broker."""

from __future__ import annotations

from dataclasses import field

from rlzmq.wire.schema import Spans, WireMessage, message

__all__ = [
    "BrokerBeat",
    "DriverState",
    "Goodbye",
    "Hello",
    "LearnerState",
    "Refused",
    "RunnerState",
    "TraceClock",
    "TraceEvents",
    "Welcome",
]


@message(1)
class Hello(WireMessage):
    """Registration of a peer, repeated to a restarted broker and whenever the sender's group changes.

    Payload: a learner adds `ranges.pack_ranges` (two frames) of the ranges that it remembers as trained, then of each
    of ``training_updates``. The driver adds `pack_ranges` of the watermarks below which it has reports.

    Attributes:
        role: ``"runner"``, ``"learner"``, ``"driver"`` or ``"observer"``.
        name: The logical name, e.g. ``"runner-3"``, which a restarted process keeps.
        uuid: Id of this process.
        hello_id: Number of this process's HELLO, from 1. WELCOME repeats it, and answers to older HELLOs are ignored.
        incarnation: The requested incarnation: the supervisor's restart count, or the one from an earlier
            WELCOME; 0: the broker decides.
        run_id, package_version, config_digest, spaces_digest: Must equal the broker's; "" = unchecked.
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
    next_seq: int
    unaccepted: Spans
    leases: tuple[int, ...]
    is_sampling: bool
    generation: int
    weights_version: int
    connector_version: int
    progress: int
    num_env_steps_sampled: int
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

    Payload: none, or one `values.pack_blob` frame: the result of `trace.take_events`, and ``offset_s``.

    Attributes:
        sent_s: The sender's clock.
        source: Id of the sender's process; the broker fills it in.
    """

    sent_s: float
    source: str = ""


@message(11, "driver")
class TraceClock(WireMessage):
    """The driver's answer to TRACE_EVENTS; the broker forwards it to the sender. Payload: (none).

    Attributes:
        source, sent_s: Those of the answered message.
        now_s: The driver's clock.
    """

    source: str
    sent_s: float
    now_s: float
