"""LearnerMemory: a learner rank's memory of its trained updates, from which a restarted broker recovers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rlzmq.wire.codec import Buffer
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges, unpack_ranges
from rlzmq.wire.messages import UpdateDone
from rlzmq.wire.schema import FragmentId, from_header, to_header
from rlzmq.wire.values import pack_blob, unpack_blob

__all__ = ["Done", "LearnerMemory"]

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
        """Remember trained ranges, packed by `ranges.pack_ranges`; () for none."""
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
