"""RunnerCore: a runner's side of the protocol: leases in, fragments out, each kept until the broker commits it.

```
   LEASE ─► queue ─► weights there? ─► sample ─► sampled ─► FRAGMENT ─► kept until COMMITTED
                        │ no: SNAPSHOT_REQUEST
```

Guarantees: one lease is sampled at a time, with weights that it allows; weights and connector state
change only between leases; every fragment gets one sequence number and is sent again until accepted
(and to a restarted broker until committed); memory is bounded by the granted leases.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlzmq.core.patience import Patience
from rlzmq.protocol.core import (
    LARGE_BYTES,
    Instruction,
    PeerCore,
    PeerTimers,
    Received,
    Send,
    unless_stopped,
)
from rlzmq.wire.codec import (
    Buffer,
    FragmentId,
    Publication,
    Spans,
    WireError,
    open_publication,
    weights_digest,
)
from rlzmq.wire.messages import (
    Accepted,
    Committed,
    ConnectorState,
    Fragment,
    Goodbye,
    Hello,
    Lease,
    LeaseReturned,
    Rejected,
    RunnerState,
    Snapshot,
    SnapshotRequest,
)
from rlzmq.wire.payloads import encode_fragment, to_spans

__all__ = ["RunnerCore", "WeightsReceiver"]

# Enough to recognize a duplicate of any lease message that can still arrive.
_MAX_RETURNS = 4  # beyond that, large messages are probably lost on the way
_NUM_REMEMBERED_LEASES = 256


class WeightsReceiver:
    """Decides which weights a receiver applies. It stores no weights, only their order.

    Weights are ordered by (generation, version). A generation is one formation of the learner group, in which the
    version increases by one per committed update. Each version is published at most once. A receiver that missed one
    (a late joiner, a slow subscriber) requests a snapshot and gets the latest one, never a queue of old ones.

    Guarantees: weights accepted by `offer` are strictly newer than all accepted before, belong to
    this run and layout, and match their digest if they have one.

    Args:
        run_id: Expected run; "" accepts any.
        layout_digest: Expected layout; "" accepts any.
    """

    generation: int
    version: int

    def __init__(self, run_id: str = "", layout_digest: str = "") -> None:
        self.run_id = run_id
        self.layout_digest = layout_digest
        self.generation = -1
        self.version = -1

    @property
    def order(self) -> tuple[int, int]:
        """(generation, version) of the applied weights; (-1, -1) before the first."""
        return (self.generation, self.version)

    def offer(self, header: Publication, body: object) -> bool:
        """Return whether to apply these weights now; True also records them as applied.

        A notice (no body) is never applied.
        """
        if (
            not header.has_body
            or header.order <= self.order
            or header.run_id != (self.run_id or header.run_id)
        ):
            return False
        if self.layout_digest and header.layout_digest != self.layout_digest:
            return False
        if header.digest and weights_digest(body) != header.digest:
            return False
        self.generation, self.version = header.order
        return True

    def satisfies(self, generation: int, version: int, *, exact: bool) -> bool:
        """Return whether a lease that requires these weights may be sampled with the applied ones."""
        if self.generation < generation:
            return False
        return self.version == version if exact else self.version >= version


@dataclass(slots=True)
class _Kept:
    """A fragment that is not committed yet."""

    fragment: Fragment
    frames: tuple[Buffer, ...]
    num_bytes: int
    sent_at: float
    num_sends: int = 1
    is_accepted: bool = False


class RunnerCore(PeerCore):
    """A runner's state machine; its guarantees are in the module docstring.

    Args:
        run_id, name, uuid: See `messages.Hello`.
        sample: ``sample(lease, weights, connector_state)`` begins to sample a lease: its `num_vector_steps`, or fewer
            if `max_s` (0: no limit) is reached; then `sampled` or `lease_failed` is called. It is called for one lease
            at a time, with what is to be loaded before: weights (header and body), whose digest has been checked, and
            connector state (one `payloads.pack_blob` frame); None: no newer ones.
        num_envs: Env steps per vector step.
        incarnation: The supervisor's restart count of this name; 0: the broker decides.
        layout_digest: Expected layout of the weights; others are refused. "" accepts any.
        spaces_digest, package_version: Checked by the broker.
        replaces: See `messages.Hello`.

    Attributes:
        min_generation: Leases of lower generations are returned, not sampled.
    """

    def __init__(
        self,
        run_id: str,
        name: str,
        uuid: str,
        *,
        sample: Callable[[Lease, tuple[Publication, Buffer] | None, Buffer | None], None],
        num_envs: int,
        incarnation: int = 0,
        layout_digest: str = "",
        spaces_digest: str = "",
        package_version: str = "",
        replaces: str = "",
        timers: PeerTimers | None = None,
    ) -> None:
        super().__init__(run_id, name, uuid, timers)
        self._sample = sample
        self.incarnation = incarnation
        self.weights: WeightsReceiver = WeightsReceiver(run_id, layout_digest)
        self.connector_version: int = -1
        self.min_generation: int = -1
        self.progress = 0
        self.pace_s: float = 0.0
        self.num_env_steps_sampled: int = 0
        self._num_envs = num_envs
        self._digests = (package_version, spaces_digest)
        self._replaces = replaces
        self._next_seq = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._queue: deque[tuple[Lease, float]] = deque()
        self._current: Lease | None = None
        self._sampled_with = -1, -1  # generation and version of its weights
        self._known_leases: OrderedDict[int, None] = OrderedDict()
        # For the next lease.
        self._new_weights: tuple[Publication, Buffer] | None = None
        self._new_connector_state: tuple[int, Buffer] | None = None
        self._asked_at = float("-inf")
        self._ask_after_s = self.timers.snapshot_wait_s
        self._answers = Patience(self.timers.snapshot_wait_s, self.timers.resend_s)
        self._leaving: str | None = None
        self._free_since = float("-inf")
        self._started_at = self._behind_s = 0.0  # the current lease: when, and its wait for the one before
        self._delivery = Patience(self.timers.resend_s)
        self._num_returns = 0  # registrations since a large message has passed
        self._has_passed = False

    def data_moves(self, now: float) -> None:
        """Ask for no weights while they may be arriving."""
        super().data_moves(now)
        self._asked_at = now

    # ------------------------------------------------------------------ facts

    def kept_fragments(self) -> dict[int, tuple[Fragment, bool]]:
        """Return the uncommitted fragments and whether each was accepted, by sequence number."""
        return {seq: (kept.fragment, kept.is_accepted) for seq, kept in self._kept.items()}

    @property
    def next_fragment(self) -> FragmentId:
        """Id of the next fragment."""
        return FragmentId(self.uuid, self.incarnation, self._next_seq)

    @property
    def has_undelivered(self) -> bool:
        """Whether the broker has not accepted all fragments yet."""
        return any(not kept.is_accepted for kept in self._kept.values())

    @property
    def is_waiting_for_weights(self) -> bool:
        """Whether a lease waits for weights or connector state."""
        return self._current is None and bool(self._queue)

    @property
    def lacks_connector_state(self) -> bool:
        """Whether the next lease requires a newer connector state."""
        return bool(self._queue) and self._queue[0][0].connector_version > self._held_connector_version()

    @property
    def path_is_narrow(self) -> bool:
        """Whether the runner had to register again and again because large messages do not pass."""
        return self._num_returns >= _MAX_RETURNS

    # ------------------------------------------------------------------ events

    @unless_stopped
    def handle(self, event: Received, now: float) -> list[Instruction]:
        """Process a message of the broker."""
        was_welcome = self.is_welcome
        instructions = super().handle(event, now)
        if self.is_welcome and not was_welcome:
            is_due = not self._has_passed or self.has_undelivered or self.is_waiting_for_weights
            self._num_returns += is_due
            instructions += self._resend(now)  # before what is sampled next
        return instructions + self._go_on(now)

    @unless_stopped
    def tick(self, now: float) -> list[Instruction]:
        """See `PeerCore.tick`."""
        return super().tick(now) + self._resend(now) + self._go_on(now)

    @unless_stopped
    def take_weights(self, frame: Buffer, now: float) -> list[Instruction]:
        """Take a publication from the SUB socket, or its body from a neighbor."""
        self._offer(frame, now)
        return self._go_on(now)

    @unless_stopped
    def ask_for(self, request: SnapshotRequest, now: float) -> list[Instruction]:
        """Request weights that a runner of the same host lacks and only the broker has."""
        return self._ask(request, now) + self._go_on(now)

    @unless_stopped
    def sampled(
        self,
        num_env_steps: int,
        now: float,
        *,
        batch: dict[str, Any] | None = None,
        arrays: Sequence[Any] = (),
        meta: Any = None,
        env_steps: tuple[int, ...] = (),
    ) -> list[Instruction]:
        """Send the fragment of the started lease.

        Args:
            num_env_steps: Its trainable steps.
            now: Current time in seconds.
            batch, arrays: Result of ``EpisodeBatch.to_wire()``. The arrays are kept, not copied, until the fragment is
                committed: never write to them again.
            meta: Any packable value: metrics, connector delta.
            env_steps: Env steps of each environment, in order, if the lease asks for them.
        """
        lease_id = self._end_lease()
        self._free_since = now
        generation, weights_version = self._sampled_with
        fragment = Fragment(
            runner=self.uuid,
            incarnation=self.incarnation,
            seq=self._next_seq,
            lease_id=lease_id,
            num_env_steps=num_env_steps,
            generation=generation,
            weights_version=weights_version,
            batch=batch or {},
            env_steps=env_steps,
            busy_s=now - self._started_at + self._behind_s,
        )
        try:
            frames = tuple(encode_fragment(fragment, arrays, meta))
        except WireError as error:  # not the fault of a received message, which a link would only refuse
            raise ValueError(f"A sampled fragment cannot be sent: {error}") from error
        num_bytes = sum(memoryview(frame).nbytes for frame in frames)
        self._kept[fragment.seq] = _Kept(
            fragment, frames, num_bytes, now if self.is_welcome else float("-inf")
        )
        self._next_seq += 1
        self.num_env_steps_sampled += num_env_steps
        sent: list[Instruction] = [Send(b"", fragment, whole=frames)] if self.is_welcome else []
        return sent + self._go_on(now)

    @unless_stopped
    def lease_failed(self, reason: str, now: float) -> list[Instruction]:
        """Return the started lease, which could not be sampled. Its steps are leased to another runner."""
        return [Send(b"", LeaseReturned(self._end_lease(), reason[:500])), *self._go_on(now)]

    def _end_lease(self) -> int:
        if self._current is None:
            raise ValueError("no lease was started")
        lease_id, self._current = self._current.lease_id, None
        return lease_id

    @unless_stopped
    def leave(self, now: float, reason: str = "leaving") -> list[Instruction]:
        """Return the queued leases; say GOODBYE once the fragment of the started one is with the broker."""
        self._leaving = reason
        returned = [Send(b"", LeaseReturned(lease.lease_id, "leaving")) for lease, _ in self._queue]
        self._queue.clear()
        return [*returned, *self._go_on(now)]

    def _go_on(self, now: float) -> list[Instruction]:
        """Start the next lease, or end if this runner leaves and everything is delivered."""
        return self._next_lease(now) + self._finish_leaving()

    def _on_message(self, event: Received, now: float) -> list[Instruction]:
        message = event.message
        if isinstance(message, Lease):
            self._mark_accepted(message.accepted)
            if message.lease_id not in self._known_leases and self._leaving is None:
                self._remember(message.lease_id)
                self._queue.append((message, now))
        elif isinstance(message, Accepted):
            if message.incarnation == self.incarnation:
                self._mark_accepted(message.accepted)
        elif isinstance(message, Committed):
            if message.incarnation == self.incarnation:
                self._forget(message)
        elif isinstance(message, Rejected):
            self._kept.pop(message.seq, None)
        elif isinstance(message, Snapshot) and event.payload:
            self._offer(event.payload[0], now)
        elif (
            isinstance(message, ConnectorState)
            and event.payload
            and message.version > self._held_connector_version()
        ):
            self._new_connector_state = message.version, event.payload[0]
        return []

    def _on_new_broker(self, now: float) -> list[Instruction]:
        # Leases of the previous broker are void, except the one being sampled, whose fragment is still accepted.
        self._queue.clear()
        self._ask_after_s = self.timers.snapshot_wait_s
        for kept in self._kept.values():  # sent again at once
            kept.is_accepted, kept.sent_at, kept.num_sends = False, float("-inf"), 0
        return []

    # ------------------------------------------------------------------ private

    def _hello(self) -> tuple[Hello, tuple[Buffer, ...]]:
        hello = Hello(
            role="runner",
            **self._identity(),
            num_envs=self._num_envs,
            first_unacked=self._first_unacked(),
            next_seq=self._next_seq,
            replaces=self._replaces,
        )
        return hello, ()

    def _state(self) -> RunnerState:
        leases = [lease.lease_id for lease, _ in self._queue]
        if self._current is not None:
            leases.append(self._current.lease_id)
        return RunnerState(
            first_unacked=self._first_unacked(),
            unaccepted=to_spans(seq for seq, kept in self._kept.items() if not kept.is_accepted),
            leases=tuple(leases),
            is_sampling=self._current is not None,
            connector_version=self.connector_version,
            progress=self.progress,
            pace_s=self.pace_s,
        )

    def _next_lease(self, now: float) -> list[Instruction]:
        """Start the next lease that the weights allow. Request weights that are missing."""
        if self._current is not None:
            return []
        instructions: list[Instruction] = []
        while self._queue:
            lease, since = self._queue[0]
            if self._is_outdated(lease, since, now):
                self._queue.popleft()
                instructions.append(Send(b"", LeaseReturned(lease.lease_id, "outdated")))
                continue
            if not self._may_start(lease):
                request = SnapshotRequest(
                    self.weights.generation, self.weights.version, self._held_connector_version()
                )
                instructions += self._ask(request, now, since=since)
                return instructions
            self._ask_after_s = self.timers.snapshot_wait_s
            self._queue.popleft()
            self._current = lease
            self._started_at, self._behind_s = now, max(0.0, self._free_since - since)
            weights, state = self._new_weights, self._new_connector_state
            self.connector_version = self._held_connector_version()
            self._new_weights = self._new_connector_state = None
            self._sampled_with = self.weights.order
            self._sample(lease, weights, state and state[1])
            break
        return instructions

    def _ask(
        self, request: SnapshotRequest, now: float, *, since: float = float("-inf")
    ) -> list[Instruction]:
        """Request weights, and again once they have taken much longer than usual."""
        has_asked = self._ask_after_s > self.timers.snapshot_wait_s
        if now - (self._asked_at if has_asked else max(since, self._asked_at)) < self._ask_after_s:
            return []
        self._asked_at = now
        self._ask_after_s = self._answers.limit_s
        return [Send(b"", request)]

    def _is_outdated(self, lease: Lease, since: float, now: float) -> bool:
        """Return whether the lease's update is over, its generation was replaced, or it has expired."""
        is_late = now - max(since, self._free_since) >= lease.timeout_s
        if is_late or lease.generation < self.min_generation:
            return True
        own = self.weights
        if own.generation > lease.generation:
            return not own.satisfies(lease.generation, lease.weights_version, exact=lease.exact)
        return lease.exact and own.generation == lease.generation and own.version > lease.weights_version

    def _may_start(self, lease: Lease) -> bool:
        return self._held_connector_version() >= lease.connector_version and self.weights.satisfies(
            lease.generation, lease.weights_version, exact=lease.exact
        )

    def _held_connector_version(self) -> int:
        return self._new_connector_state[0] if self._new_connector_state else self.connector_version

    def _offer(self, frame: Buffer, now: float) -> None:
        self._passed(memoryview(frame).nbytes)
        try:
            header, body = open_publication(frame)
        except WireError:
            return
        if self.weights.offer(header, body):
            self._new_weights = header, body
            if self._ask_after_s > self.timers.snapshot_wait_s:
                self._answers.note(now - self._asked_at)
            self._ask_after_s = self.timers.snapshot_wait_s
        elif not header.has_body and header.order > self.weights.order:
            self._ask_after_s = 0.0  # they will not come by themselves

    def _resend(self, now: float) -> list[Instruction]:
        if not self.is_welcome:
            return []
        instructions: list[Instruction] = []
        for kept in self._kept.values():
            if not kept.is_accepted and now - kept.sent_at >= self._delivery.limit_s * kept.num_sends:
                kept.sent_at = now
                kept.num_sends += 1
                instructions.append(Send(b"", kept.fragment, whole=kept.frames))
        return instructions

    def _finish_leaving(self) -> list[Instruction]:
        if self._leaving is None or self._current is not None or self.is_stopped:
            return []
        if self.has_undelivered:
            return []
        return [Send(b"", Goodbye(self._leaving)), *self._stop("left", self._leaving)]

    def _mark_accepted(self, spans: Spans) -> None:
        for first, last in spans:
            for kept in map(self._kept.__getitem__, self._seqs_within(first, last)):
                if not kept.is_accepted and kept.sent_at > float("-inf"):
                    self._delivery.note(self._heard_at - kept.sent_at)
                kept.is_accepted = True
                self._passed(kept.num_bytes)

    def _passed(self, num_bytes: int) -> None:
        if num_bytes >= LARGE_BYTES:
            self._has_passed, self._num_returns = True, 0

    def _forget(self, message: Committed) -> None:
        for first, last in ((0, message.watermark - 1), *message.committed):
            for seq in self._seqs_within(first, last):
                del self._kept[seq]

    def _seqs_within(self, first: int, last: int) -> list[int]:
        # Spans come from the wire and may be huge, so iterate over the fragments held here instead.
        if last - first < 4:
            return [seq for seq in range(first, last + 1) if seq in self._kept]
        return [seq for seq in self._kept if first <= seq <= last]

    def _first_unacked(self) -> int:
        return next(iter(self._kept), self._next_seq)

    def _remember(self, lease_id: int) -> None:
        self._known_leases[lease_id] = None
        if len(self._known_leases) > _NUM_REMEMBERED_LEASES:
            self._known_leases.popitem(last=False)
