"""LearnerCore: a learner rank's side of the protocol. It trains exactly the planned steps, each update once.

```
   SHARD_PLAN, SHARD… ─► decode ─► all decoded ─► SHARD_READY ─► TRAIN ─► train, in order
   update_trained ─► UPDATE_DONE until UPDATE_COMMITTED;  rank 0: new_weights ─► WEIGHTS
```

Guarantees: `train` is called only for update ``next_update``, once per update and generation, after every rank has
sent READY, and with exactly the planned steps. Shards of a lower attempt or of another generation are discarded.
Trained ranges are remembered until their runners have forgotten them, so that a restarted broker does not have them
trained again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlzmq.core.errors import ProtocolError
from rlzmq.protocol.core import Instruction, PeerCore, PeerTimers, Received, Send, unless_stopped
from rlzmq.wire.codec import Buffer, FragmentId, from_header, to_header
from rlzmq.wire.messages import (
    Hello,
    LearnerState,
    Refused,
    Shard,
    ShardPlan,
    ShardReady,
    ShardRefused,
    SnapshotRequest,
    Train,
    UpdateCommitted,
    UpdateDone,
    Weights,
)
from rlzmq.wire.payloads import FragmentRange, pack_blob, pack_ranges, unpack_blob, unpack_ranges

__all__ = ["Done", "LearnerCore", "LearnerMemory", "UnusableError"]


class UnusableError(ProtocolError):
    """A shard must not be trained.

    Attributes:
        reason: Short code, for the broker.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


# Maximum number of runners whose fragments were never confirmed as forgotten; the oldest are removed first.
_MAX_REMEMBERED_RUNNERS = 4096


@dataclass(slots=True)
class Done:
    """An update trained by this rank and not confirmed by the broker yet."""

    message: UpdateDone
    payload: tuple[Buffer, ...]
    sent_at: float


class LearnerMemory:
    """Trained updates until they are confirmed, and trained ranges until their runners have forgotten them.

    Attributes:
        done: Unconfirmed updates by id.
    """

    def __init__(self) -> None:
        self.done: dict[int, Done] = {}
        self._trained: OrderedDict[tuple[str, int], dict[int, int]] = OrderedDict()

    def note_trained(self, frames: tuple[Buffer, ...]) -> None:
        """Remember trained ranges, packed by `payloads.pack_ranges`; () for none."""
        if len(frames) != 2:
            return
        for fragment, first, num_steps in unpack_ranges(frames):
            key = (fragment.runner, fragment.incarnation)
            done = self._trained.setdefault(key, {})
            done[fragment.seq] = max(done.get(fragment.seq, 0), first + num_steps)
            self._trained.move_to_end(key)
        while len(self._trained) > _MAX_REMEMBERED_RUNNERS:
            self._trained.popitem(last=False)

    def forget(self, frames: tuple[Buffer, ...]) -> None:
        """Forget fragments below these, which their runners no longer hold; packed in the same way."""
        for fragment, _, _ in unpack_ranges(frames) if len(frames) == 2 else ():
            key = (fragment.runner, fragment.incarnation)
            done = self._trained.get(key)
            if done is None:
                continue
            for seq in [seq for seq in done if seq < fragment.seq]:
                del done[seq]
            if not done:
                del self._trained[key]

    def ranges(self) -> list[FragmentRange]:
        """Return all remembered ranges. Each one begins at the fragment's first step."""
        return [
            FragmentRange(FragmentId(runner, incarnation, seq), 0, end)
            for (runner, incarnation), done in self._trained.items()
            for seq, end in done.items()
        ]

    def pack(self, lineage: int) -> bytes:
        """Return the memory and its lineage, packed for ranks that adopt this rank's state."""
        done = [
            [to_header(item.message), [bytes(memoryview(frame).cast("B")) for frame in item.payload]]
            for item in self.done.values()
        ]
        return pack_blob({"lineage": lineage, "trained": list(pack_ranges(self.ranges())), "done": done})

    def add(self, packed: Buffer) -> int:
        """Merge another rank's packed memory and return its lineage."""
        content = unpack_blob(packed)
        self.note_trained(tuple(content["trained"]))
        for header, payload in content["done"]:
            message = from_header(UpdateDone, header)
            if message.update_id not in self.done:
                self.done[message.update_id] = Done(message, tuple(payload), float("-inf"))
        return int(content["lineage"])


_RECEIVING, _READY, _TRAINING = 0, 1, 2


@dataclass(slots=True)
class _HeldShard:
    """An update's shard, from its plan until it is trained."""

    attempt: int
    plan: ShardPlan | None = None
    decoded: dict[int, tuple[Shard, Any]] = field(default_factory=dict)
    ready_at: float = float("-inf")
    phase: int = _RECEIVING
    train: Train | None = None
    train_ranges: tuple[Buffer, ...] = ()

    @property
    def is_complete(self) -> bool:
        return self.plan is not None and len(self.decoded) == self.plan.num_fragments

    @property
    def data(self) -> list[Any]:
        """What was decoded, in the order of index."""
        return [self.decoded[index][1] for index in sorted(self.decoded)]


class LearnerCore(PeerCore):
    """A learner rank's state machine. Nothing is sent before the first `begin_generation`.

    Args:
        run_id, name, uuid: See `messages.Hello`.
        decode: ``decode(shard, frames)`` decodes and checks a shard's fragment (`payloads.decode_fragment`), and cuts
            out its range; the result is what `train` gets. It raises `UnusableError`.
        find_odd: ``find_odd(decoded)`` returns why those of an update's shards must not be trained that do not fit the
            others, by their place; called once all are decoded.
        train: ``train(plan, decoded)`` begins to train the decoded shards of a plan, in the order of index; then
            `update_trained` is called.

    Attributes:
        is_forming: Whether the group is being re-formed. A "fenced" refusal of its last generation is then ignored.
    """

    generation: int
    num_ranks: int
    rank: int

    def __init__(
        self,
        run_id: str,
        name: str,
        uuid: str,
        *,
        decode: Callable[[Shard, tuple[Buffer, ...]], Any],
        find_odd: Callable[[Sequence[Any]], dict[int, str]],
        train: Callable[[ShardPlan, Sequence[Any]], None],
        timers: PeerTimers | None = None,
    ) -> None:
        super().__init__(run_id, name, uuid, timers)
        self._decode = decode
        self._find_odd = find_odd
        self._train = train
        self.generation = -1
        self.rank = -1
        self.num_ranks = 0
        self.lineage: int = -1
        self.is_forming: bool = False
        self.next_update: int = 0
        self.progress = 0
        self.patience_s: float = 0.0
        self._held: dict[int, _HeldShard] = {}
        self._running: int | None = None
        self._memory = LearnerMemory()
        self._weights: tuple[Weights, Buffer] | None = None

    # ------------------------------------------------------------------ facts

    def training_ranges(self, update_id: int) -> list[FragmentRange]:
        """Return an update's ranges over all ranks once TRAIN has arrived; before, an empty list."""
        held = self._held.get(update_id)
        return unpack_ranges(held.train_ranges) if held is not None and held.train else []

    # ------------------------------------------------------------------ events

    @unless_stopped
    def handle(self, event: Received, now: float) -> list[Instruction]:
        """Process a message of the broker."""
        refused = event.message if isinstance(event.message, Refused) else None
        is_past = self.is_forming or (refused and refused.generation < self.generation)
        if refused and refused.reason == "fenced" and is_past:
            return []  # it answers a HELLO sent before the group was re-formed
        return super().handle(event, now) + self._advance(now)

    @unless_stopped
    def update_trained(
        self,
        update_id: int,
        attempt: int,
        trained: bool,
        num_trained_steps: int,
        results: Buffer,
        now: float,
    ) -> list[Instruction]:
        """Confirm the update of `train`: the group applied it, or all ranks skipped it.

        Args:
            update_id, attempt: Those of the plan.
            trained: Whether it was applied.
            num_trained_steps: Steps that went through the loss on all ranks (replayed ones count once per use).
            results: One `payloads.pack_blob` frame.
            now: Current time in seconds.
        """
        held = self._matching(update_id, attempt)
        if held is None or self._running != update_id:
            return self._advance(now)  # it is from an earlier generation, whose state was replaced
        del self._held[update_id]
        self._running = None
        self.next_update = update_id + 1
        self._memory.note_trained(held.train_ranges)
        done = UpdateDone(update_id, attempt, self.generation, self.rank, trained, num_trained_steps)
        payload = (results, *held.train_ranges)
        self._memory.done[update_id] = Done(done, payload, now)
        return [Send(b"", done, payload), *self._advance(now)]

    @unless_stopped
    def new_weights(self, generation: int, version: int, frame: Buffer) -> list[Instruction]:
        """Publish rank 0's newest weights, a sealed publication frame."""
        self._weights = (Weights(generation, version), frame)
        return self._send_weights()

    def export_memory(self) -> bytes:
        """Return this rank's memory of trained updates, packed.

        Ranks that adopt this rank's state need it together with the parameters and the optimizer state
        (`begin_generation`).
        """
        return self._memory.pack(self.lineage)

    @unless_stopped
    def begin_generation(
        self,
        generation: int,
        rank: int,
        num_ranks: int,
        next_update: int,
        now: float,
        *,
        memory: Buffer = b"",
        begins_lineage: bool = False,
    ) -> list[Instruction]:
        """Begin a new generation. Updates that the group's state has not trained are discarded.

        Args:
            generation, rank, num_ranks: The generation, this rank's place and the group's size.
            next_update: First update that the state has not trained which all ranks share.
            now: Current time in seconds.
            memory: `export_memory` of the rank whose state all ranks adopted, broadcast with the state; b"" for a new
                run or after a checkpoint was restored.
            begins_lineage: Whether a checkpoint was restored instead of the previous generation's state. The driver
                then sends RESET with this generation to the broker.
        """
        if generation <= self.generation:
            raise ValueError(f"generation {generation} is not above {self.generation}")
        for update_id, held in self._held.items():
            if update_id < next_update:
                # The group's state has trained it (here or on the rank whose state was adopted).
                self._memory.note_trained(held.train_ranges)
        self._held.clear()
        self.is_forming = False
        self.generation, self.rank, self.num_ranks = generation, rank, num_ranks
        if memory:
            self.lineage = self._memory.add(memory)
        if begins_lineage:
            self.lineage = generation
        for update_id in [u for u in self._memory.done if u >= next_update]:
            del self._memory.done[update_id]  # its step did not survive
        for done in self._memory.done.values():
            done.message, done.sent_at = replace(done.message, generation=generation), float("-inf")
        self.next_update = next_update
        self._running = None
        return self.start(now)

    def _on_message(self, event: Received, now: float) -> list[Instruction]:
        message = event.message
        if isinstance(message, UpdateCommitted):
            if message.generation == self.generation:
                self._memory.done.pop(message.update_id, None)
            self._memory.forget(event.payload)
            return []
        if isinstance(message, SnapshotRequest):
            newest = self._weights[0] if self._weights else None
            if newest and (newest.generation, newest.version) > (message.generation, message.version):
                return self._send_weights()
            return []
        if not isinstance(message, (ShardPlan, Shard, Train)):
            return []
        if message.generation != self.generation or message.update_id < self.next_update:
            return []
        if not self.is_welcome or message.broker_incarnation != self.broker_incarnation:
            # HELLO told the broker exactly which updates are held here. Nothing may change them until WELCOME, and no
            # message of an earlier broker may change them after that.
            return []
        if isinstance(message, Train):
            return self._on_train(message, event.payload)
        held = self._open(message.update_id, message.attempt)
        if held is None:
            return []
        if isinstance(message, ShardPlan):
            held.plan = message
        elif message.index not in held.decoded:
            try:
                held.decoded[message.index] = message, self._decode(message, event.payload)
            except UnusableError as error:
                return [self._refuse(message, error.reason, str(error))]
        return []

    def _on_train(self, message: Train, payload: tuple[Buffer, ...]) -> list[Instruction]:
        held = self._matching(message.update_id, message.attempt)
        # TRAIN follows this rank's READY; one that overtook other messages is sent again.
        if held is not None and held.is_complete and held.train is None:
            held.train, held.train_ranges = message, payload
        return []

    @unless_stopped
    def tick(self, now: float) -> list[Instruction]:
        """See `PeerCore.tick`."""
        if self.generation < 0:
            return []
        instructions = super().tick(now)
        if not self.is_welcome:
            return instructions
        for done in self._memory.done.values():
            if now - done.sent_at >= self.timers.resend_s:
                done.sent_at = now
                instructions.append(Send(b"", done.message, done.payload))
        for update_id, held in self._held.items():
            if held.phase == _READY and now - held.ready_at >= self.timers.resend_s:
                held.ready_at = now
                instructions.append(self._ready(update_id, held))
        return instructions + self._advance(now)

    def _on_new_broker(self, now: float) -> list[Instruction]:
        for done in self._memory.done.values():
            done.sent_at = float("-inf")  # sent again by the next tick
        for held in self._held.values():
            held.ready_at = float("-inf")
            if held.phase == _READY:
                # HELLO named the updates with TRAIN. The new broker repeats TRAIN if it still holds them.
                held.train, held.train_ranges = None, ()
        return self._send_weights()

    # ------------------------------------------------------------------ private

    def _advance(self, now: float) -> list[Instruction]:
        """Send READY for complete shards, and start the next update once its TRAIN has arrived."""
        instructions: list[Instruction] = []
        for update_id, held in self._held.items():
            if held.phase == _RECEIVING and held.is_complete:
                odd = self._find_odd(held.data)
                for index, detail in odd.items():
                    # Forget the shard. If the refusal is lost, the broker sends the shard again.
                    shard, _ = held.decoded.pop(index)
                    instructions.append(self._refuse(shard, "unusable", detail))
                if odd:
                    continue
                held.phase = _READY
                held.ready_at = now
                instructions.append(self._ready(update_id, held))
        head = self._held.get(self.next_update)
        if self._running is None and head is not None and head.train is not None:
            assert head.plan is not None, "TRAIN is kept once all of the plan is decoded"
            self._running = self.next_update
            head.phase = _TRAINING
            self._train(head.plan, head.data)
        return instructions

    def _refuse(self, shard: Shard, reason: str, detail: str) -> Send:
        numbers = shard.update_id, shard.attempt, self.generation
        return Send(b"", ShardRefused(*numbers, shard.fragment, reason, detail[:1000]))

    def _ready(self, update_id: int, held: _HeldShard) -> Send:
        return Send(b"", ShardReady(update_id, held.attempt, self.generation, self.rank))

    def _open(self, update_id: int, attempt: int) -> _HeldShard | None:
        """Return the held update of this attempt, created if new. A higher attempt replaces a lower one."""
        held = self._held.get(update_id)
        if held is not None and held.attempt == attempt:
            return held
        if held is not None and (attempt < held.attempt or held.phase == _TRAINING):
            return None
        opened = self._held[update_id] = _HeldShard(attempt)
        return opened

    def _matching(self, update_id: int, attempt: int) -> _HeldShard | None:
        held = self._held.get(update_id)
        return held if held is not None and held.attempt == attempt else None

    def _send_weights(self) -> list[Instruction]:
        if self._weights is None or not self.is_welcome or self.rank != 0:
            return []
        message, frame = self._weights
        return [Send(b"", message, (frame,))] if message.generation == self.generation else []

    def _hello(self) -> tuple[Hello, tuple[Buffer, ...]]:
        training = {u: item for u, item in self._held.items() if item.train is not None}
        hello = Hello(
            role="learner",
            **self._identity(),
            generation=self.generation,
            rank=self.rank,
            num_ranks=self.num_ranks,
            next_update=self.next_update,
            training_updates=tuple(training),
            training_attempts=tuple(item.attempt for item in training.values()),
            lineage=self.lineage,
        )
        payload = pack_ranges(self._memory.ranges())
        for item in training.values():
            payload.extend(item.train_ranges)
        return hello, tuple(payload)

    def _state(self) -> LearnerState:
        held = sorted(self._held.items())
        return LearnerState(
            generation=self.generation,
            next_update=self.next_update,
            update_ids=tuple(update_id for update_id, _ in held),
            attempts=tuple(item.attempt for _, item in held),
            num_held=tuple(len(item.decoded) for _, item in held),
            phases=tuple(item.phase for _, item in held),
            progress=self.progress,
            patience_s=self.patience_s,
        )
