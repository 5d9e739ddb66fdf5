"""BrokerState: peers, the learner group, open updates, the ledger, and the weights.

The holder of a key may send HELLO with any number of names. Records of runners that delivered are kept for long. Those
of other peers from outside, the newcomers, can be forgotten without loss: they are removed with the connection.

```
 rank 0 ── WEIGHTS ──► store ─► PUB to all runners; SNAPSHOT to a runner that joins late or requests it
 driver ── CONNECTOR_STATE ──► store ─► each runner, before its next lease
```

The way of new weights, in order::

    rank 0    LearnerLink._snapshot          flattens them, after the last optimizer step of an update
              LearnerCore.new_weights        sends them as WEIGHTS
    broker    PublishedState.put_weights     keeps the newest and publishes them
    runner    RunnerLink._on_weights         receives them, or SNAPSHOT
              WeightsReceiver.offer          takes them if they are newer and their digest is right
              RunnerCore._next_lease         brings them with the next lease
              RunnerLink._load               loads them on the sampler thread (EnvRunner.set_weights)
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rlzmq.core.patience import HEARTBEAT_S, RESEND_S, Patience, Retries
from rlzmq.protocol.core import Instruction, Publish, Received, Send
from rlzmq.protocol.ledger import DropReason, Entry, LeaseBook, Ledger, Pace, RunnerRecord
from rlzmq.wire.codec import (
    Buffer,
    FragmentId,
    Publication,
    Spans,
    WireMessage,
    first_number,
    open_publication,
)
from rlzmq.wire.messages import (
    CommitReport,
    Config,
    ConnectorState,
    Hello,
    Notice,
    OpenUpdate,
    Snapshot,
    SnapshotRequest,
    Weights,
)
from rlzmq.wire.payloads import FragmentRange, to_spans

__all__ = [
    "BrokerOptions",
    "BrokerState",
    "KeptReport",
    "OpenedUpdate",
    "Peer",
    "Plan",
    "PublishedState",
    "Receipts",
]


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Timers and limits of the broker. Durations in seconds.

    Attributes:
        run_id: Id of the run; peers of another run are refused.
        incarnation: Increases with every start of the run's broker, e.g. milliseconds of wall time.
        heartbeat_s: Interval of all heartbeats.
        peer_timeout_s: A peer silent for this long is lost, or for longer if it often is; see `Patience`. Usually the
            transport notices sooner.
        resend_s: Time after which an unanswered message is sent again. So long a restarted broker also waits for
            fragments of an update that was trained in the meantime, so that its report is complete; not for those of
            runners that have been replaced.
        max_leases_per_runner: Maximum number of leases per runner. With 1, a runner would idle for a round trip
            between two leases.
        window_messages, window_bytes: Uncommitted fragments per runner beyond which it may not sample
            ahead of the update being collected.
        memory_bytes: Bytes of held and leased fragments beyond which no runner may sample ahead.
        resent_bytes: Bytes of held fragments beyond which a runner may add only its share of `memory_bytes`
            without a lease, as runners do after a restart of the broker.
        forget_after_s: A runner absent for this long is forgotten and may not come back.
        death_limit: Number of learner deaths during its training after which a fragment is quarantined.
    """

    run_id: str
    incarnation: int
    heartbeat_s: float = HEARTBEAT_S
    peer_timeout_s: float = 10.0
    resend_s: float = RESEND_S
    max_leases_per_runner: int = 2
    window_messages: int = 64
    window_bytes: int = 32 * 1024 * 1024
    memory_bytes: int = 1024 * 1024 * 1024
    resent_bytes: int = 1024 * 1024 * 1024
    forget_after_s: float = 3600.0
    death_limit: int = 3


class Receipts:
    """Acknowledgements to be sent to runners.

    A runner keeps a fragment until it *may be forgotten*: it is committed, and the driver has the report of its end.
    Being committed is not enough, because a restarted broker rebuilds missing reports from the fragments that runners
    send again.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, set[int]] = {}
        self._forgettable: dict[tuple[str, int], RunnerRecord] = {}
        self._news_for: set[tuple[str, int]] = set()

    # ------------------------------------------------------------------ accepted

    def accept(self, runner: str, seq: int) -> None:
        """Acknowledge a fragment that is in the ledger."""
        self._accepted.setdefault(runner, set()).add(seq)

    def take_accepted(self, runner: str) -> Spans:
        """Return and clear the accepted sequence numbers not yet sent to this runner."""
        return to_spans(self._accepted.pop(runner, ()))

    def runners_to_tell(self) -> list[str]:
        """Return the runners for which `take_accepted` is not empty."""
        return list(self._accepted)

    # ------------------------------------------------------------------ may be forgotten

    def may_forget(self, runner: str, incarnation: int) -> RunnerRecord:
        """Return the record of the fragments that this runner may forget."""
        return self._forgettable.setdefault((runner, incarnation), RunnerRecord())

    def let_go(self, fragment: FragmentId) -> None:
        """Let the runner forget a fragment: the driver has the report of its end."""
        self.may_forget(fragment.runner, fragment.incarnation).commit(fragment.seq)
        self._news_for.add((fragment.runner, fragment.incarnation))

    def let_go_below(self, fragment: FragmentId) -> None:
        """Let the runner forget all fragments before this one."""
        self.may_forget(fragment.runner, fragment.incarnation).commit_below(fragment.seq)
        self._news_for.add((fragment.runner, fragment.incarnation))

    def take_news(self) -> list[tuple[str, int]]:
        """Return (runner, incarnation) of the runners that may forget more since the last call, sorted."""
        news = sorted(self._news_for)
        self._news_for.clear()
        return news

    # ------------------------------------------------------------------ removed runners

    def forget_peer(self, runner: str) -> None:
        """Discard the acknowledgements of a runner that is no longer registered. It asks again on its return."""
        self._accepted.pop(runner, None)

    def forget_record(self, runner: str, incarnation: int) -> None:
        """Discard the record of a runner that may not come back."""
        self._forgettable.pop((runner, incarnation), None)


K = TypeVar("K")
V = TypeVar("V")


# Fenced processes are remembered, so that their late messages and HELLOs are refused.
_MAX_FENCED = 10_000
# Remembered names and HELLO ids, including those of ended processes.
_MAX_KNOWN = 65_536
# What is repeated more often indicates a path that loses large messages.
_MAX_CONFIG_REQUESTS, _MAX_RETURNS = 8, 4
# Absent runners that have delivered something.
_MAX_ABSENT = 4096
# Messages of one peer that nobody can use, after which it is expelled. An external peer must be restarted then.
_MAX_BAD = 10
# Rate limit of notices about external peers, which may provoke any number of them.
_NOTICE_BURST = 200
_NOTICES_PER_S = 20


@dataclass(slots=True)
class Peer:
    """A registered peer.

    Attributes:
        routing: Routing id, which changes when the peer reconnects.
        next_update: For a learner: the first update that it has not trained.
        is_suspect: Whether it let a lease expire, without progress since then.
        is_overdue: For a runner: whether a lease expired despite its progress, and it has delivered nothing since then.
        shown_envs: For a runner: env steps of its largest fragment, at most its `num_envs`; 0 before the first.
        has_worked: Whether the runner's samples were accepted.
        origin: For a newcomer, i.e. a peer from outside that has not worked: the role of its key, and its address.
        progress: What it last reported.
        pace_s: For a runner, the longest recent time between two of its vector steps; for a rank, how long it may make
            no progress.
        silence: How long it may send nothing.
        travel: For a runner, how long messages, weights and data are on their way for a lease.
        sampling: For a runner, its speed without that.
        first_unacked: For a runner: the value in its last heartbeat.
        sampled: For a runner: number of env steps accepted from it.
        num_bad: Number of its messages that violate the protocol, and of fragments that learners cannot use.
        pace, fragment_at: For a runner: its sampling speed, and when its last fragment arrived.
        traced_at: When its next TRACE_EVENTS is expected.
    """

    routing: bytes
    hello: Hello
    incarnation: int
    heard_at: float
    next_update: int = 0
    is_suspect: bool = False
    is_overdue: bool = False
    shown_envs: int = 0
    has_worked: bool = False
    origin: str = ""
    progress: int = -1
    pace_s: float = 0.0
    silence: Patience = field(default_factory=Patience)
    travel: Patience = field(default_factory=Patience)
    sampling: Pace = field(default_factory=Pace)
    first_unacked: int = 0
    sampled: int = 0
    num_bad: int = 0
    connector_version: int = -1
    pace: Pace = field(default_factory=Pace)
    fragment_at: float = float("-inf")
    traced_at: float = float("-inf")

    @property
    def uuid(self) -> str:
        """Id of the peer's process."""
        return self.hello.uuid

    def heard(self, now: float) -> None:
        """Record a message from the peer."""
        self.heard_at = now
        self.silence.moved(now)


@dataclass(frozen=True, slots=True)
class OpenedUpdate:
    """An update that the driver has requested and that is not committed yet."""

    terms: OpenUpdate
    at: float


@dataclass(slots=True)
class Plan:
    """One update from its plan to its commit.

    Attributes:
        shards: Ranges that each rank trains; empty if adopted from an earlier broker's plan.
        ranges: All shards, in order.
        is_training: Whether TRAIN was sent; the plan is then fixed until the generation ends.
        done_by: Ids of the learners that have sent UPDATE_DONE. A new one repeats that of the rank whose state it has.
        results: Results of each rank's UPDATE_DONE, by its rank in the group that trained it.
        num_trained_steps: Env steps that all ranks trained, counting repetitions.
        planned_at: When its batch was complete; None if it was adopted.
    """

    update_id: int
    attempt: int
    generation: int
    num_ranks: int
    shards: list[list[FragmentRange]]
    ranges: list[FragmentRange]
    rank_uuids: list[str]
    sent_at: dict[int, float] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    is_training: bool = False
    trained: bool = True
    num_trained_steps: int = 0
    done_by: set[str] = field(default_factory=set)
    results: dict[int, Buffer] = field(default_factory=dict)
    planned_at: float | None = None

    @property
    def num_steps(self) -> int:
        """Number of env steps in the whole batch."""
        return sum(item.num_steps for item in self.ranges)


@dataclass(slots=True)
class KeptReport:
    """A report that the driver has not confirmed.

    Attributes:
        fragments: Those that end with it. Their runners keep them until the driver has the report, so that a
            restarted broker could rebuild it.
    """

    message: CommitReport
    payload: tuple[Buffer, ...]
    sent_at: float
    fragments: list[FragmentId]


class BrokerState:
    """State shared by the parts of `BrokerCore`, which change it and collect instructions in ``out``."""

    def __init__(self, options: BrokerOptions) -> None:
        self.options = options
        self.out: list[Instruction] = []
        self.started_at: float | None = None
        self.now: float = 0.0
        # peers
        self.by_routing: dict[bytes, Peer] = {}
        self.runners: dict[str, Peer] = {}
        self.most_envs: int = 0  # largest `shown_envs` of the registered runners
        self.ranks: dict[int, Peer] = {}
        self.last_delivery = ""  # the runner that fulfilled a lease last
        self.forgetters: dict[str, None] = {}  # runners that hold fewer fragments since learners were told
        self.driver: Peer | None = None
        self.names: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self.fenced: OrderedDict[str, None] = OrderedDict()
        self.hello_ids: OrderedDict[str, int] = OrderedDict()
        self.references: dict[str, str] = {}
        self.config_requests: Retries = Retries(_MAX_CONFIG_REQUESTS)
        self.returns: Retries = Retries(
            _MAX_RETURNS
        )  # registrations of external runners, until a fragment arrives
        self.config: tuple[Config, Buffer] | None = None
        # learner group
        self.generation = -1
        self.min_generation = -1
        self.num_ranks = 0
        self.group_next_update: int | None = None
        # updates
        self.next_commit: int | None = None
        self.open: dict[int, OpenedUpdate] = {}
        self.terms: OpenUpdate | None = None
        self.plans: dict[int, Plan] = {}
        self.reports: dict[int, KeptReport] = {}
        self.commit_pace: Pace = Pace()  # committed env steps per second
        self.committed_at: float | None = None
        self.attempts: itertools.count[int] = itertools.count(first_number(options.incarnation))
        self.unpublished: dict[int, int] = {}
        self.to_report: list[tuple[FragmentId, int, Buffer]] = []
        self.committed: list[FragmentId] = []  # fragments for the next report
        # Peers that are to be expelled, and the last of their bad messages.
        self.offenders: dict[bytes, str] = {}
        self.bottleneck = ""
        # data
        self.ledger: Ledger = Ledger()
        self.leases: LeaseBook = LeaseBook(first_number(options.incarnation), options.max_leases_per_runner)
        self.receipts: Receipts = Receipts()
        # weights
        self.weights: Publication | None = None
        self.weights_frame: Buffer = b""
        self.connector_version = -1
        self.connector_message: tuple[WireMessage, Buffer] | None = None
        # counters and notices
        self.refused: dict[str, int] = {}
        self.num_moves: int = 0
        self.moved_at: float = float("-inf")
        self.notices: deque[Notice] = deque(maxlen=256)
        self.num_notices_left_out: int = 0
        self._notices_left: float = _NOTICE_BURST
        self._notices_at = 0.0

    # ------------------------------------------------------------------ sending

    def send(self, peer: Peer | bytes, message: WireMessage, payload: tuple[Buffer, ...] = ()) -> None:
        """Add a Send instruction."""
        routing = peer if isinstance(peer, bytes) else peer.routing
        self.out.append(Send(routing, message, payload))

    def notify(self, event: str, role: str, name: str, detail: str = "") -> None:
        """Send the driver a notice, now or when it registers. Notices about external peers are rate-limited."""
        if (role == "observer" or "@" in name) and not self._may_notify():
            self.num_notices_left_out += 1
            return
        notice = Notice(event, role, name[:200], detail[:1000])
        if self.driver is not None:
            self.send(self.driver, notice)
        else:
            self.notices.append(notice)

    def _may_notify(self) -> bool:
        earned = _NOTICES_PER_S * (self.now - self._notices_at)
        self._notices_left = min(float(_NOTICE_BURST), self._notices_left + earned)
        self._notices_at = self.now
        may_notify = self._notices_left >= 1.0
        self._notices_left -= may_notify
        return may_notify

    def moved(self, phase: Literal["collecting", "training"], now: float) -> None:
        """Record progress, if the next update is in this phase."""
        if (phase == "training") == (self.next_commit in self.plans):
            self.num_moves += 1
            self.moved_at = now

    def still_s(self, now: float) -> float:
        """Return the number of seconds since the last progress of the next update; 0 if none is open."""
        opened = self.open.get(self.next_commit) if self.next_commit is not None else None
        return now - max(self.moved_at, opened.at) if opened is not None else 0.0

    def count_refused(self, reason: str) -> None:
        """Count a refused message."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def count_bad(self, peer: Peer, detail: str) -> None:
        """Count a message of a peer that nobody can use. After too many, the peer is expelled."""
        peer.num_bad += 1
        if peer.num_bad >= _MAX_BAD and peer is not self.driver:
            self.offenders[peer.routing] = detail

    # ------------------------------------------------------------------ facts

    @property
    def group_is_complete(self) -> bool:
        """Whether every rank of the current generation is registered."""
        return self.num_ranks > 0 and len(self.ranks) == self.num_ranks

    @property
    def next_plan(self) -> int | None:
        """The update being collected: the first one without a plan."""
        if self.next_commit is None:
            return None
        update_id = self.next_commit
        while update_id in self.plans:
            update_id += 1
        return update_id

    def plan_of(self, update_id: int, attempt: int) -> Plan | None:
        """Return the plan of an update if it has this attempt, else None."""
        plan = self.plans.get(update_id)
        return plan if plan is not None and plan.attempt == attempt else None

    def terms_of(self, update_id: int) -> OpenUpdate | None:
        """Return the driver's request; None if the update is not open."""
        opened = self.open.get(update_id)
        return opened.terms if opened is not None else None

    def batch_of(self, update: OpenUpdate) -> int:
        """Return the number of env steps for which the update is sampled, at least."""
        return update.steps_per_rank * update.num_ranks

    def version_bounds(self, update: OpenUpdate) -> tuple[int, int | None]:
        """Return the oldest and newest weights versions whose data the update may train."""
        newest = update.weights_version if update.staleness == 0 else None
        if update.max_policy_lag < 0:
            return 0, newest
        if newest is not None:
            return newest, newest
        # Batches smaller than one vector step fill their slots with older data by construction.
        lag = max(update.max_policy_lag, -(-self.most_envs // max(1, self.batch_of(update))))
        return update.weights_version - lag, None

    def forget_envs(self, peer: Peer) -> None:
        """Update `most_envs` after a runner left."""
        if peer.shown_envs >= self.most_envs:
            self.most_envs = max((other.shown_envs for other in self.runners.values()), default=0)

    def fence(self, uuid: str) -> None:
        """Refuse this process from now on."""
        _remember(self.fenced, uuid, None, _MAX_FENCED)

    def know(self, hello: Hello, incarnation: int) -> None:
        """Record a process as the owner of its name, with its newest HELLO."""
        _remember(self.hello_ids, hello.uuid, hello.hello_id, _MAX_KNOWN)
        _remember(self.names, (hello.role, hello.name), (hello.uuid, incarnation), _MAX_KNOWN)

    def forget_newcomer(self, peer: Peer) -> None:
        """Remove all records of a newcomer."""
        self.hello_ids.pop(peer.uuid, None)
        name = peer.hello.role, peer.hello.name
        if self.names.get(name, ("",))[0] == peer.uuid:
            del self.names[name]
        if (peer.uuid, peer.incarnation) in self.ledger.runners:
            self._forget_runner(peer.uuid, peer.incarnation)

    def forget_absent(self, now: float) -> None:
        """Forget runners that were absent for too long, and the longest absent ones if there are too many.

        A forgotten runner that comes back is refused.
        """
        absent: list[tuple[float, str, int]] = []
        for (uuid, incarnation), record in list(self.ledger.runners.items()):
            peer = self.runners.get(uuid)
            if record.num_uncommitted or (peer is not None and peer.incarnation == incarnation):
                record.absent_since = None
            elif record.absent_since is None:
                record.absent_since = now
            if record.absent_since is not None:
                absent.append((record.absent_since, uuid, incarnation))
        absent.sort()
        for index, (since, uuid, incarnation) in enumerate(absent):
            if len(absent) - index > _MAX_ABSENT or now - since >= self.options.forget_after_s:
                self._forget_runner(uuid, incarnation)
                if uuid not in self.runners:
                    self.fence(uuid)

    def _forget_runner(self, uuid: str, incarnation: int) -> None:
        self.ledger.forget(uuid, incarnation)
        self.receipts.forget_record(uuid, incarnation)

    def drop(self, entry: Entry, reason: DropReason) -> None:
        """Drop an entry's free steps. Its meta still reaches the driver."""
        self.to_be_reported(entry)
        self.ledger.drop(entry, reason)

    def take_committed(self) -> None:
        """Move newly committed fragments from the ledger to the next report."""
        committed = self.ledger.pop_committed()
        self.leases.changed.update(fragment.runner for fragment in committed)
        self.committed.extend(committed)

    def to_be_reported(self, entry: Entry) -> None:
        """Add a fragment to the next report, once; with its meta, unless its lineage was abandoned."""
        if not entry.is_reported:
            entry.is_reported = True
            has_meta = len(entry.frames) > 1 and entry.generation >= self.min_generation
            self.to_report.append((entry.id, entry.size, entry.frames[-1] if has_meta else b""))


def _remember(known: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Set an item as the newest one. Beyond `limit` items, the oldest one is removed."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > limit:
        known.popitem(last=False)


class PublishedState:
    """Holds the newest weights, from rank 0 of the current generation, and the newest connector state."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._asked_at = float("-inf")

    # ------------------------------------------------------------------ weights

    def put_weights(self, peer: Peer, message: Weights, event: Received, now: float) -> None:
        """Store and publish weights from rank 0 if they are newer."""
        state = self._state
        if peer.hello.rank != 0 or message.generation != state.generation or not event.payload:
            state.count_refused("weights")
            return
        header, _ = open_publication(event.payload[0])
        if header.run_id != state.options.run_id or header.order != (message.generation, message.version):
            state.count_refused("weights")
            return
        if state.weights is not None and header.order <= state.weights.order:
            return
        state.weights, state.weights_frame = header, event.payload[0]
        state.out.append(Publish(state.weights_frame))
        self.release_published()

    def release_published(self) -> None:
        """Free the slots of updates whose weights have been published."""
        state = self._state
        if state.weights is not None:
            for update_id in [u for u in state.unpublished if u < state.weights.version]:
                del state.unpublished[update_id]

    def ask_for_weights(self, now: float) -> None:
        """Request weights from rank 0 if it has newer ones, because a message was lost or this broker is new."""
        state = self._state
        rank_0 = state.ranks.get(0)
        if rank_0 is None or now - self._asked_at < state.options.resend_s:
            return
        have = state.weights.order if state.weights is not None else (-1, -1)
        if have < (state.generation, rank_0.next_update):
            self._asked_at = now
            state.send(rank_0, SnapshotRequest(*have))

    def on_snapshot_request(self, peer: Peer, message: SnapshotRequest, event: Received, now: float) -> None:
        """Send a runner the weights or connector state that its lease requires and that it lacks."""
        state = self._state
        if state.weights is not None and state.weights.order > (message.generation, message.version):
            state.send(peer, Snapshot(), (state.weights_frame,))
        peer.connector_version = message.connector_version
        self.send_connector_state(peer)

    # ------------------------------------------------------------------ connector state

    def put_connector_state(self, peer: Peer, message: ConnectorState, event: Received, now: float) -> None:
        """Store the driver's merged connector state if it is newer."""
        state = self._state
        if message.version > state.connector_version and event.payload:
            state.connector_version = message.version
            state.connector_message = (message, event.payload[0])

    def send_connector_state(self, peer: Peer) -> None:
        """Send the newest connector state if this runner has not received it."""
        state = self._state
        if state.connector_message is not None and peer.connector_version < state.connector_version:
            message, blob = state.connector_message
            peer.connector_version = state.connector_version
            state.send(peer, message, (blob,))

    # ------------------------------------------------------------------ both

    def greet(self, peer: Peer) -> None:
        """Send the newest connector state and weights to a runner that joins."""
        state = self._state
        self.send_connector_state(peer)
        if state.weights is not None and not peer.hello.next_seq:
            state.send(peer, Snapshot(), (state.weights_frame,))
