"""Journal: the broker's journal without its files. It decides what to write, acknowledge and restore.

```
 accepted ─► FRAGMENT record ─► on disk ─► ACCEPTED to the runner
 committed ─► TRAINED record          dropped ─► DROPPED record
 a checkpoint covers updates below u ─► segments whose fragments were all finished below u are removed
 resumed at update u ─► fragments that the checkpoint does not cover are restored, or dropped with a reason
```

Guarantees. A fragment is acknowledged only once its record is on disk. Segments are removed oldest first, so a
fragment's record never outlives the record of its end. A restored fragment is trained once in the resumed lineage; a
fragment that the checkpoint covers, even in part, is not restored.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlzmq.protocol.accounting import DROP_REASONS, DropReason
from rlzmq.protocol.events import JournalAppend, JournalRemove
from rlzmq.wire.codec import Buffer
from rlzmq.wire.errors import MalformedFrameError, WireError
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges, unpack_ranges
from rlzmq.wire.messages import Fragment, decode_message
from rlzmq.wire.schema import FragmentId

__all__ = ["Journal", "Recalled", "plan_recall"]

_FRAGMENT, _TRAINED, _DROPPED = 1, 2, 3
_FRAGMENT_HEAD = struct.Struct("<II")  # bytes of the runner's name, number of frames
_RANGES_HEAD = struct.Struct("<qI")  # update, bytes of the runners' names
_POISON = ("rejected", "quarantined")
# A segment is removed as a whole, so it is small enough to be removed soon and large enough to be started rarely.
_SEGMENT_BYTES = 64 << 20
# Without checkpoints nothing is ever covered. Beyond this size, finished segments are removed, oldest first.
_MAX_BYTES = 4 << 30


@dataclass(slots=True)
class _Segment:
    number: int
    num_bytes: int = 0
    num_open: int = 0
    last_update: int = -1


@dataclass(slots=True)
class _Open:
    """An unfinished fragment and the segment of its record."""

    segment: _Segment


class Journal:
    """The journal's state machine. `take` returns the collected instructions.

    Args:
        is_on: If False, every method does nothing, and no acknowledgement is withheld.
        segment_bytes: Size at which the next segment begins.
        max_bytes: Total size beyond which the oldest finished segments are removed, covered or not.
    """

    def __init__(
        self, is_on: bool, *, segment_bytes: int = _SEGMENT_BYTES, max_bytes: int = _MAX_BYTES
    ) -> None:
        self.is_on: bool = is_on
        self.num_fragments: int = 0
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self._segments: deque[_Segment] = deque([_Segment(0)])
        self._open: dict[FragmentId, _Open] = {}
        self._unsynced: OrderedDict[int, FragmentId] = OrderedDict()
        self._withheld: set[FragmentId] = set()
        self._next_number = 0
        self._covered = -1
        self._first_trained: int | None = None
        self._at = 0
        self._out: list[JournalAppend | JournalRemove] = []

    def take(self) -> list[JournalAppend | JournalRemove]:
        """Return and clear the collected instructions, in order."""
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------------ from the broker

    def accepted(self, fragment: FragmentId, name: str, frames: Sequence[Buffer]) -> None:
        """Record an accepted fragment and withhold its acknowledgement until it is on disk."""
        if not self.is_on or fragment in self._open:
            return
        encoded = name.encode()
        sizes = [memoryview(frame).nbytes for frame in frames]
        head = _FRAGMENT_HEAD.pack(len(encoded), len(frames)) + encoded
        head += struct.pack(f"<{len(sizes)}q", *sizes)
        segment = self._segment_for(len(head) + sum(sizes))
        segment.num_open += 1
        self._open[fragment] = _Open(segment)
        self._unsynced[self._next_number] = fragment
        self._withheld.add(fragment)
        self.num_fragments += 1
        self._append(segment, _FRAGMENT, (head, *frames))

    def is_withheld(self, fragment: FragmentId) -> bool:
        """Return whether the fragment must not be acknowledged yet."""
        return fragment in self._withheld

    def trained(self, update_id: int, ranges: Iterable[FragmentRange]) -> None:
        """Record the ranges of an update being committed. Drops until `reported` belong to its report."""
        if not self.is_on:
            return
        ranges = list(ranges)
        self._at = update_id
        if self._first_trained is None:
            self._first_trained = update_id
        for fragment, _, _ in ranges:
            self._touch(fragment)
        self._append_ranges(_TRAINED, update_id, ranges)

    def reported(self, update_id: int) -> None:
        """Record that the update's report was made, so later drops belong to the next one."""
        self._at = update_id + 1

    def dropped(self, fragment: FragmentId, reason: DropReason) -> None:
        """Record that a fragment's free steps were dropped."""
        if self.is_on and fragment in self._open:
            self._touch(fragment)
            self._append_ranges(_DROPPED, self._at, [FragmentRange(fragment, DROP_REASONS.index(reason), 0)])

    def settled(self, fragments: Iterable[FragmentId]) -> None:
        """Record fragments whose every step was trained or dropped."""
        for fragment in fragments:
            entry = self._open.pop(fragment, None)
            if entry is not None:
                entry.segment.num_open -= 1
        self._prune()

    def begin_lineage(self, next_update: int) -> None:
        """Start a new lineage after a state was restored. Earlier fragments will never be restored."""
        if not self.is_on:
            return
        self._at = next_update
        self._covered, self._first_trained = -1, None
        self._open.clear()
        self._begin_segment()
        last = self._segments.pop()
        self._segments = deque([last])
        self._out.append(JournalRemove(last.number))

    # ------------------------------------------------------------------ from outside

    def synced(self, number: int) -> list[FragmentId]:
        """Record that records up to this one are on disk; return the fragments to acknowledge."""
        due = []
        while self._unsynced and next(iter(self._unsynced)) <= number:
            _, fragment = self._unsynced.popitem(last=False)
            self._withheld.discard(fragment)
            due.append(fragment)
        return due

    def failed(self) -> list[FragmentId]:
        """Turn the journal off after a disk error; return the fragments to acknowledge."""
        due = self.synced(self._next_number)
        self.is_on = False
        self._open.clear()
        self._out.clear()
        return due

    def covered(self, next_update: int) -> None:
        """Record a checkpoint that contains the result of all updates below this one."""
        if not self.is_on or next_update <= self._covered:
            return
        self._covered = next_update
        if self._first_trained is not None and next_update > self._first_trained:
            # Segments of earlier brokers, whose relevant content was sent again.
            self._out.append(JournalRemove(0))
        if self._segments[-1].num_bytes:
            self._begin_segment()
        self._prune()

    # ------------------------------------------------------------------ private

    def _touch(self, fragment: FragmentId) -> None:
        if (entry := self._open.get(fragment)) is not None:
            entry.segment.last_update = max(entry.segment.last_update, self._at)

    def _append_ranges(self, kind: int, update_id: int, ranges: list[FragmentRange]) -> None:
        names, table = pack_ranges(ranges)
        parts = (_RANGES_HEAD.pack(update_id, memoryview(names).nbytes), names, table)
        self._append(self._segment_for(sum(memoryview(part).nbytes for part in parts)), kind, parts)

    def _append(self, segment: _Segment, kind: int, parts: tuple[Buffer, ...]) -> None:
        self._out.append(JournalAppend(self._next_number, segment.number, kind, parts))
        self._next_number += 1

    def _segment_for(self, num_bytes: int) -> _Segment:
        segment = self._segments[-1]
        if segment.num_bytes and segment.num_bytes + num_bytes > self._segment_bytes:
            segment = self._begin_segment()
        segment.num_bytes += num_bytes
        return segment

    def _begin_segment(self) -> _Segment:
        self._segments.append(_Segment(self._segments[-1].number + 1))
        return self._segments[-1]

    def _prune(self) -> None:
        """Remove finished segments, oldest first, but never the one being written."""
        total = sum(segment.num_bytes for segment in self._segments)
        before = self._segments[0].number
        while len(self._segments) > 1 and not self._segments[0].num_open:
            oldest = self._segments[0]
            if oldest.last_update >= self._covered and total <= self._max_bytes:
                break
            total -= oldest.num_bytes
            self._segments.popleft()
        if self._segments[0].number > before:
            self._out.append(JournalRemove(self._segments[0].number))


@dataclass(frozen=True, slots=True)
class Recalled:
    """A fragment in the journal that the checkpoint does not cover.

    Attributes:
        runner_name: Name of the runner that sampled it.
        frames: Frames of its message.
        reason: Why it is dropped; None: it is restored.
    """

    message: Fragment
    runner_name: str
    frames: tuple[Buffer, ...]
    reason: DropReason | None


@dataclass(slots=True)
class _Read:
    fragments: dict[FragmentId, tuple[Fragment, str, tuple[Buffer, ...]]] = field(default_factory=dict)
    covered: set[FragmentId] = field(default_factory=set)
    poison: dict[FragmentId, DropReason] = field(default_factory=dict)


def plan_recall(
    records: Iterable[tuple[int, memoryview]], *, next_update: int, max_lag: int = 0
) -> list[Recalled]:
    """Decide which journalled fragments a run that resumes from a checkpoint restores or drops.

    Args:
        records: (kind, payload) in the order of writing. Unreadable ones are skipped.
        next_update: The first update after the checkpoint, which is also its weights version; -1: the run restarts
            with weights that sampled none of the fragments.
        max_lag: Number of versions by which data may be older than that; below 0: any.
    """
    read = _Read()
    for kind, payload in records:
        try:
            _read_record(read, kind, payload, next_update)
        except WireError:
            continue  # the checksum is right, so another release wrote it
    recalled = []
    for fragment, (message, name, frames) in read.fragments.items():
        if fragment in read.covered:
            continue
        reason: DropReason | None = read.poison.get(fragment)
        if reason is None and message.weights_version > next_update:
            reason = "rolled_back"
        elif reason is None and 0 <= max_lag < next_update - message.weights_version:
            reason = "stale"
        if reason is not None:
            frames = (frames[0], frames[-1])  # a dropped fragment is only reported
        recalled.append(Recalled(message, name, frames, reason))
    return recalled


def _read_record(read: _Read, kind: int, payload: memoryview, next_update: int) -> None:
    if kind == _FRAGMENT:
        message, name, frames = _fragment_of(payload)
        read.fragments.setdefault(message.fragment_id, (message, name, frames))
    elif kind in (_TRAINED, _DROPPED):
        update_id, ranges = _ranges_of(payload)
        for fragment, index, _ in ranges:
            if update_id < next_update:
                read.covered.add(fragment)
            elif kind == _DROPPED and index < len(DROP_REASONS) and DROP_REASONS[index] in _POISON:
                read.poison[fragment] = DROP_REASONS[index]


def _fragment_of(payload: memoryview) -> tuple[Fragment, str, tuple[Buffer, ...]]:
    if len(payload) < _FRAGMENT_HEAD.size:
        raise MalformedFrameError("a journal record is too short")
    name_bytes, num_frames = _FRAGMENT_HEAD.unpack_from(payload)
    start = _FRAGMENT_HEAD.size + name_bytes
    end = start + 8 * num_frames
    if end > len(payload) or not num_frames:
        raise MalformedFrameError("a journal record has fewer bytes than declared")
    sizes = struct.unpack_from(f"<{num_frames}q", payload, start)
    if min(sizes) < 0 or end + sum(sizes) != len(payload):
        raise MalformedFrameError("the frame sizes of a journal record do not match its length")
    frames = []
    for size in sizes:
        frames.append(payload[end : end + size])
        end += size
    name = bytes(payload[_FRAGMENT_HEAD.size : start]).decode(errors="replace")
    message, _ = decode_message(frames)
    if not isinstance(message, Fragment) or len(frames) < 2 or message.num_env_steps < 0:
        raise MalformedFrameError("a journal record does not hold a fragment")
    return message, name, tuple(frames)


def _ranges_of(payload: memoryview) -> tuple[int, list[FragmentRange]]:
    if len(payload) < _RANGES_HEAD.size:
        raise MalformedFrameError("a journal record is too short")
    update_id, name_bytes = _RANGES_HEAD.unpack_from(payload)
    start = _RANGES_HEAD.size + name_bytes
    return update_id, unpack_ranges([payload[_RANGES_HEAD.size : start], payload[start:]])
