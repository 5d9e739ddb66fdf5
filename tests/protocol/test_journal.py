"""What the broker's journal writes, withholds, removes and gives back."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from core_fakes import Bench
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.protocol.events import (
    JournalAppend,
    JournalFailed,
    JournalRecalled,
    JournalRemove,
    JournalSynced,
    Tick,
)
from rlzmq.protocol.journal import Journal, plan_recall
from rlzmq.wire.fragment_message import FragmentRange, encode_fragment
from rlzmq.wire.messages import (
    Accepted,
    Fragment,
    Lease,
    Notice,
    Reset,
    ShardPlan,
    ShardRefused,
    encode_message,
)
from rlzmq.wire.schema import FragmentId


def fragment(seq: int, *, version: int = 3, steps: int = 10, runner: str = "r") -> Fragment:
    return Fragment(runner, 1, seq, 0, steps, 1, version, -1, {})


def frames_of(message: Fragment) -> tuple[Any, ...]:
    return tuple(encode_fragment(message, [np.arange(3)], {"num_env_steps": message.num_env_steps}))


class Disk:
    """Does what a journal says, in memory."""

    def __init__(self, **options: Any) -> None:
        self.journal = Journal(True, **options)
        self.segments: dict[int, list[tuple[int, memoryview]]] = {}
        self.last = -1

    def write(self) -> None:
        self.put(self.journal.take())

    def put(self, instructions: list[Any]) -> None:
        for item in instructions:
            if isinstance(item, JournalAppend):
                payload = memoryview(b"".join(bytes(memoryview(part).cast("B")) for part in item.parts))
                self.segments.setdefault(item.segment, []).append((item.kind, payload))
                self.last = item.number
            elif isinstance(item, JournalRemove):
                self.segments = {n: records for n, records in self.segments.items() if n >= item.before}

    def accept(self, *messages: Fragment) -> None:
        for message in messages:
            self.journal.accepted(message.fragment_id, "runner-0", frames_of(message))
        self.write()

    def train(self, update: int, *ranges: FragmentRange) -> None:
        self.journal.trained(update, ranges)
        self.journal.reported(update)
        self.write()

    def drop(self, message: Fragment, reason: Any) -> None:
        self.journal.dropped(message.fragment_id, reason)
        self.settle(message)

    def settle(self, *messages: Fragment) -> None:
        self.journal.settled(message.fragment_id for message in messages)
        self.write()

    def recall(self, next_update: int, max_lag: int = 0) -> dict[int, str | None]:
        records = [record for _, segment in sorted(self.segments.items()) for record in segment]
        items = plan_recall(records, next_update=next_update, max_lag=max_lag)
        return {item.message.seq: item.reason for item in items}


def whole(message: Fragment) -> FragmentRange:
    return FragmentRange(message.fragment_id, 0, message.num_env_steps)


# ------------------------------------------------------------------ what comes back


def test_what_the_checkpoint_does_not_cover_comes_back_if_its_weights_fit() -> None:
    disk = Disk()
    trained, pending, newer, older = (fragment(seq, version=v) for seq, v in enumerate((3, 3, 4, 2)))
    disk.accept(trained, pending, newer, older)
    disk.train(3, whole(trained))
    assert disk.recall(3) == {0: None, 1: None, 2: "rolled_back", 3: "stale"}, "update 3 is undone"
    assert disk.recall(4) == {1: "stale", 2: None, 3: "stale"}, "update 3 is in the checkpoint"
    assert disk.recall(4, max_lag=1) == {1: None, 2: None, 3: "stale"}
    assert disk.recall(4, max_lag=-1) == {1: None, 2: None, 3: None}
    assert set(disk.recall(-1).values()) == {"rolled_back"}, "a run that begins anew"


def test_what_the_checkpoint_covers_in_part_stays_out() -> None:
    disk = Disk()
    cut = fragment(0)
    disk.accept(cut)
    disk.train(3, FragmentRange(cut.fragment_id, 0, 4))
    assert disk.recall(4, max_lag=-1) == {}
    assert disk.recall(3) == {0: None}


def test_poison_is_never_given_back() -> None:
    disk = Disk()
    bad, surplus = fragment(0), fragment(1)
    disk.accept(bad, surplus)
    disk.train(2)
    disk.drop(bad, "rejected")
    disk.drop(surplus, "surplus")
    assert disk.recall(3) == {0: "rejected", 1: None}
    assert disk.recall(4, max_lag=-1) == {}, "both are in the checkpoint's account"


@given(st.binary(max_size=80), st.integers(0, 4))
def test_no_payload_is_worse_than_unreadable(payload: bytes, kind: int) -> None:
    plan_recall([(kind, memoryview(payload))], next_update=3)


@given(st.data())
def test_a_damaged_record_gives_back_nothing_or_a_fragment(data: Any) -> None:
    disk = Disk()
    disk.accept(fragment(0))
    ((kind, payload),) = disk.segments[0]
    content = bytearray(payload)
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    plan_recall([(kind, memoryview(bytes(content[:cut])))], next_update=3)


def test_sizes_of_a_record_may_be_zero_but_not_negative() -> None:
    disk = Disk()
    message = fragment(0)
    frames = encode_fragment(message, [np.arange(3), np.empty(0)], {"num_env_steps": 10})
    disk.journal.accepted(message.fragment_id, "r", frames)
    disk.write()
    ((kind, payload),) = disk.segments[0]
    sizes = [memoryview(frame).nbytes for frame in frames]
    assert 0 in sizes
    assert len(plan_recall([(kind, payload)], next_update=3)) == 1
    packed = struct.pack(f"<{len(sizes)}q", *sizes)
    head, array, nothing, meta = sizes
    for wrong, num_missing in (  # the sum fits the record
        ([head + 8, array - 8, nothing, meta], 0),
        ([head + array + 8, -8, nothing, meta], 0),
        ([head, array, -3, meta], 3),
    ):
        damaged = bytes(payload).replace(packed, struct.pack(f"<{len(wrong)}q", *wrong))
        damaged = damaged[: len(damaged) - num_missing]
        assert damaged != bytes(payload)
        assert not plan_recall([(kind, memoryview(damaged))], next_update=3)


def test_an_empty_fragment_without_arrays_comes_back() -> None:
    disk = Disk()
    message = fragment(0, steps=0)
    frames = encode_fragment(message, [], {"num_env_steps": 0})
    assert len(frames) == 2
    disk.journal.accepted(message.fragment_id, "r", frames)
    disk.write()
    assert disk.recall(3) == {0: None}


# ------------------------------------------------------------------ segments


def test_segments_go_when_all_in_them_is_done_with_and_covered() -> None:
    disk = Disk(segment_bytes=1)
    first, second = fragment(0), fragment(1)
    disk.accept(first, second)
    disk.journal.covered(3)
    disk.train(3, whole(first))
    disk.settle(first)
    disk.write()
    assert disk.recall(3) == {0: None, 1: None}, "covered below 3 only"
    disk.journal.covered(4)
    disk.write()
    assert disk.recall(4, max_lag=-1) == {1: None}
    assert 0 not in disk.segments
    disk.train(4, whole(second))
    disk.settle(second)
    disk.journal.covered(5)
    disk.write()
    assert not any(disk.segments.values())


def test_a_record_of_training_outlives_the_record_of_its_fragment() -> None:
    """An open fragment in the oldest segment keeps all later ones."""
    disk = Disk(segment_bytes=1)
    slow, fast = fragment(0), fragment(1)
    disk.accept(slow, fast)
    disk.train(3, FragmentRange(slow.fragment_id, 0, 1), whole(fast))
    disk.settle(fast)
    disk.journal.covered(4)
    disk.write()
    assert len(disk.segments) == 3
    assert disk.recall(4, max_lag=-1) == {}


def test_without_checkpoints_the_oldest_that_is_done_with_goes_by_size() -> None:
    disk = Disk(segment_bytes=1000, max_bytes=5000)
    for seq in range(60):
        message = fragment(seq)
        disk.accept(message)
        disk.train(3, whole(message))
        disk.settle(message)
    size = sum(len(payload) for records in disk.segments.values() for _, payload in records)
    assert size < 7000


def test_a_restored_state_ends_what_was_accepted_before() -> None:
    disk = Disk()
    disk.accept(fragment(0))
    disk.journal.begin_lineage(3)
    disk.accept(fragment(1))
    assert disk.recall(3) == {1: None}


def test_what_is_dropped_before_an_update_is_trained_belongs_to_the_first() -> None:
    disk = Disk()
    bad = fragment(0)
    disk.accept(bad)
    disk.drop(bad, "rejected")
    assert disk.recall(0, max_lag=-1) == {0: "rejected"}
    assert disk.recall(1, max_lag=-1) == {}


def test_what_a_new_lineage_drops_belongs_to_its_first_update() -> None:
    disk = Disk()
    disk.train(5)
    disk.journal.begin_lineage(3)
    bad = fragment(0)
    disk.accept(bad)
    disk.drop(bad, "rejected")
    assert disk.recall(3) == {0: "rejected"}
    assert disk.recall(4, max_lag=-1) == {}


def test_a_checkpoint_ends_what_it_covers_though_nothing_was_written_since_the_last() -> None:
    disk = Disk()
    message = fragment(0)
    disk.accept(message)
    disk.train(5, whole(message))
    disk.settle(message)
    for next_update, num_segments in ((3, 1), (6, 0)):
        disk.journal.covered(next_update)
        disk.write()
        assert len(disk.segments) == num_segments


@pytest.mark.parametrize(
    "frames",
    [
        frames_of(fragment(0))[:1],
        frames_of(fragment(0, steps=-1)),
        (*encode_message(Accepted(1, ())), b"meta"),
    ],
)
def test_a_record_of_anything_but_a_fragment_gives_back_nothing(frames: tuple[Any, ...]) -> None:
    disk = Disk()
    disk.journal.accepted(fragment(0).fragment_id, "runner-0", frames)
    disk.write()
    assert disk.recall(3) == {}


# ------------------------------------------------------------------ in the broker


def journalled() -> Bench:
    bench = Bench(journal=True)
    bench.ready_run()
    bench.runner()
    return bench


def last_number(bench: Bench) -> int:
    return max(item.number for item in bench.out if isinstance(item, JournalAppend))


def told(bench: Bench) -> list[Any]:
    return [
        spans
        for kind in (Accepted, Lease)
        for message in bench.sent("runner", kind)
        if (spans := message.accepted)
    ]


def test_a_runner_hears_of_acceptance_when_it_is_on_disk() -> None:
    bench = journalled()
    bench.fragment(steps=2)
    assert told(bench) == []
    number = last_number(bench)
    bench.event(JournalSynced(number - 1))
    assert told(bench) == []
    bench.event(JournalSynced(number))
    assert told(bench) == [((0, 0),)]


def test_a_fragment_sent_again_is_not_acknowledged_early_either() -> None:
    bench = journalled()
    bench.fragment(steps=2, seq=0)
    number = last_number(bench)
    bench.fragment(steps=2, seq=0)
    assert told(bench) == []
    bench.event(JournalSynced(number))
    bench.fragment(steps=2, seq=0)
    assert told(bench) == [((0, 0),)]


def test_a_disk_that_fails_ends_the_journal_not_the_run() -> None:
    bench = journalled()
    bench.fragment(steps=2)
    bench.event(JournalFailed("No space left"))
    assert told(bench) == [((0, 0),)]
    assert bench.sent("driver", Notice)[0].event == "journal_failed"
    bench.fragment(steps=2)
    assert told(bench) == [((1, 1),)]
    assert not [item for item in bench.out if isinstance(item, JournalAppend | JournalRemove)]


def test_what_is_given_back_is_pending_and_what_does_not_fit_is_dropped_with_its_reason() -> None:
    bench = journalled()
    bench.send("driver", Reset(7, 3))
    disk = Disk()
    disk.accept(fragment(0, steps=8, runner="gone"), fragment(1, version=9, steps=4, runner="gone"))
    items = plan_recall(disk.segments[0], next_update=3)
    bench.event(JournalRecalled(6, items))
    assert bench.state.ledger.accounting.pending == 0, "of a lineage that is over"
    bench.event(JournalRecalled(7, items))
    accounting = bench.state.ledger.accounting
    assert (accounting.sampled, accounting.pending) == (12, 8)
    assert accounting.dropped["rolled_back"] == 4
    entry = bench.state.ledger.entries[FragmentId("gone", 1, 0)]
    assert (entry.version, entry.generation, entry.runner_name) == (3, 7, "runner-0")
    assert [item.kind for item in bench.out if isinstance(item, JournalAppend)] == [1], "it is written anew"


class Journalled(Bench):
    """A broker whose journal is written."""

    def __init__(self) -> None:
        self.disk = Disk()
        super().__init__(journal=True)

    def event(self, event: Any) -> list[Any]:
        self.disk.put(super().event(event))
        return self.out


def test_a_broker_writes_what_it_trained_and_dropped_with_the_update_whose_report_tells_of_it() -> None:
    bench = Journalled()
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)  # 0: trained by update 0
    plan = bench.make_ready()
    bench.fragment(steps=6)  # 1: surplus of update 0
    bench.done(plan)
    bench.open(1, batch=20)
    bench.fragment(steps=20, version=1)  # 2: refused after the report of update 0
    (plan,) = bench.sent("learner-0", ShardPlan)
    bad = FragmentId("uuid-runner", 1, 2)
    bench.send("learner-0", ShardRefused(1, plan.attempt, 1, bad, "not_finite", "NaN"))
    assert bench.disk.recall(0, max_lag=-1) == {0: None, 1: None, 2: "rejected"}
    assert bench.disk.recall(1, max_lag=-1) == {2: "rejected"}
    assert bench.disk.recall(2, max_lag=-1) == {}


def test_a_broker_removes_what_a_checkpoint_covers_and_what_an_ended_lineage_has_left() -> None:
    bench = Journalled()
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    bench.done(bench.make_ready())
    bench.state.journal.covered(1)
    bench.event(Tick())
    assert list(bench.disk.segments) == []
    bench.fragment(steps=20, version=1)
    assert bench.disk.recall(1) == {1: None}
    bench.send("driver", Reset(7, 1))
    bench.event(Tick())
    assert list(bench.disk.segments) == []
    bench.learner(generation=7, lineage=7)
    bench.weights(1, generation=7)
    bench.fragment(steps=20, version=1, generation=7)
    assert bench.disk.recall(1) == {2: None}
