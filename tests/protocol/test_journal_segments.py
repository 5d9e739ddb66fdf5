"""A journal's segments, its records as bytes, and what a broker does with what comes back."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from core_fakes import Bench

from rlzmq.protocol.events import JournalAppend, JournalFailed, JournalRecalled, JournalRemove, JournalSynced
from rlzmq.protocol.journal import Journal, Recalled, plan_recall
from rlzmq.wire.fragment_message import FragmentRange, encode_fragment, pack_ranges
from rlzmq.wire.messages import Accepted, Fragment, Goodbye, Reset
from rlzmq.wire.schema import FragmentId

FRAGMENT, TRAINED, DROPPED = 1, 2, 3


def _message(seq: int = 0, *, version: int = 3, steps: int = 10) -> Fragment:
    return Fragment("r", 1, seq, 0, steps, 1, version, -1, {})


def _frames(message: Fragment) -> tuple[Any, ...]:
    arrays = [np.arange(3), np.arange(4)]
    return tuple(bytes(memoryview(f).cast("B")) for f in encode_fragment(message, arrays, {"a": 1}))


def _accept(journal: Journal, *seqs: int) -> list[Any]:
    for seq in seqs:
        message = _message(seq)
        journal.accepted(message.fragment_id, "runner-0", _frames(message))
    return journal.take()


def _range(seq: int, num_steps: int = 10) -> FragmentRange:
    return FragmentRange(FragmentId("r", 1, seq), 0, num_steps)


def _payload(item: JournalAppend) -> memoryview:
    return memoryview(b"".join(bytes(memoryview(part).cast("B")) for part in item.parts))


def _removed(items: list[Any]) -> list[int]:
    return [item.before for item in items if isinstance(item, JournalRemove)]


# ------------------------------------------------------------------ off, on, failed


def test_a_journal_that_is_off_does_nothing():
    journal = Journal(False)
    assert _accept(journal, 0) == []
    assert not journal.is_withheld(FragmentId("r", 1, 0))
    journal.trained(3, [_range(0)])
    journal.dropped(FragmentId("r", 1, 0), "stale")
    journal.settled([FragmentId("r", 1, 0)])
    journal.begin_lineage(3)
    journal.covered(4)
    assert journal.take() == []
    assert journal.num_fragments == 0


def test_a_fragment_is_written_once_and_withheld_until_it_is_on_disk():
    journal = Journal(True)
    first, second = (FragmentId("r", 1, seq) for seq in (0, 1))
    (append,) = _accept(journal, 0)
    assert (append.number, append.segment, append.kind) == (0, 0, FRAGMENT)
    assert _accept(journal, 0) == []
    (append,) = _accept(journal, 1)
    assert (append.number, journal.num_fragments) == (1, 2)
    assert [journal.is_withheld(fragment) for fragment in (first, second)] == [True, True]
    assert journal.synced(0) == [first]
    assert [journal.is_withheld(fragment) for fragment in (first, second)] == [False, True]
    assert journal.synced(0) == []
    assert journal.synced(5) == [second]


def test_a_journal_that_failed_withholds_and_writes_nothing_any_more():
    journal = Journal(True)
    _accept(journal, 0)
    journal.trained(3, [_range(0)])
    journal.accepted(FragmentId("r", 1, 1), "runner-0", _frames(_message(1)))
    assert [fragment.seq for fragment in journal.failed()] == [0, 1]
    assert journal.take() == _accept(journal, 2) == []
    assert not journal.is_withheld(FragmentId("r", 1, 2))


def test_a_journal_that_failed_removes_nothing_any_more():
    journal = Journal(True, segment_bytes=1, max_bytes=1)
    _accept(journal, 0, 1)
    journal.failed()
    journal.settled([FragmentId("r", 1, 0)])
    assert journal.take() == []


# ------------------------------------------------------------------ segments


def test_a_segment_is_filled_to_its_size_and_then_the_next_begins():
    size = sum(_payload(item).nbytes for item in _accept(Journal(True), 0))
    for segment_bytes, segments in ((2 * size, [0, 0, 1]), (2 * size - 1, [0, 1, 2]), (1, [0, 1, 2])):
        journal = Journal(True, segment_bytes=segment_bytes)
        assert [item.segment for item in _accept(journal, 0, 1, 2)] == segments


def test_a_checkpoint_begins_a_segment_unless_nothing_is_in_the_last():
    journal = Journal(True)
    journal.covered(1)
    assert [item.segment for item in _accept(journal, 0)] == [0]
    journal.covered(1)
    assert [item.segment for item in _accept(journal, 1)] == [0], "the same checkpoint"
    journal.covered(2)
    assert [item.segment for item in _accept(journal, 2)] == [1]


@pytest.mark.parametrize(
    ("is_dropped", "covered", "removed"), [(False, 3, []), (False, 4, [1]), (True, 4, []), (True, 5, [1])]
)
def test_what_an_update_has_used_stays_until_a_checkpoint_covers_it_and_what_is_dropped_until_the_next_ones(
    is_dropped, covered, removed
):
    journal = Journal(True, segment_bytes=1)
    _accept(journal, 0, 1)
    journal.trained(3, [] if is_dropped else [_range(0)])
    journal.reported(3)
    if is_dropped:  # after the report: it belongs to the next update
        journal.dropped(FragmentId("r", 1, 0), "stale")
    journal.settled([FragmentId("r", 1, 0)])
    journal.take()
    journal.covered(covered)
    assert [before for before in _removed(journal.take()) if before] == removed


def test_segments_of_brokers_before_go_with_the_first_checkpoint_behind_what_this_one_trained():
    journal = Journal(True)
    journal.covered(3)
    assert journal.take() == []
    journal.trained(3, [])
    journal.take()
    journal.covered(4)
    assert _removed(journal.take())[0] == 0
    journal = Journal(True)
    journal.trained(3, [])
    journal.trained(4, [])
    journal.take()
    journal.covered(3)
    assert 0 not in _removed(journal.take())


def test_without_checkpoints_the_oldest_go_beyond_a_size():
    size = sum(_payload(item).nbytes for item in _accept(Journal(True), 0))
    journal = Journal(True, segment_bytes=1, max_bytes=2 * size)
    for seq in range(4):
        _accept(journal, seq)
        journal.settled([FragmentId("r", 1, seq)])
    assert _removed(journal.take()) == [2], "exactly as much stays"


def test_an_open_fragment_keeps_its_segment_and_all_later_ones_whatever_their_size():
    journal = Journal(True, segment_bytes=1, max_bytes=1)
    _accept(journal, 0, 1, 2)
    journal.settled([FragmentId("r", 1, 1)])
    assert _removed(journal.take()) == []
    journal.settled([FragmentId("r", 1, 0)])
    assert _removed(journal.take()) == [2]


def test_a_restored_state_removes_everything_and_counts_anew():
    journal = Journal(True)
    _accept(journal, 0)
    journal.trained(3, [])
    journal.take()
    journal.begin_lineage(2)
    assert _removed(journal.take()) == [1]
    (append,) = _accept(journal, 0)
    assert append.segment == 1
    journal.covered(3)
    assert 0 not in _removed(journal.take()), "nothing is trained in this lineage yet"


# ------------------------------------------------------------------ records


def _record(*sizes: int, name: bytes = b"n", body: bytes = b"", num_frames: int | None = None) -> memoryview:
    head = struct.pack("<II", len(name), len(sizes) if num_frames is None else num_frames) + name
    return memoryview(head + struct.pack(f"<{len(sizes)}q", *sizes) + body)


def test_a_record_gives_back_what_was_written():
    journal = Journal(True)
    (append,) = _accept(journal, 7)
    (recalled,) = plan_recall([(append.kind, _payload(append))], next_update=3)
    assert (recalled.message, recalled.runner_name, recalled.reason) == (_message(7), "runner-0", None)
    assert [bytes(frame) for frame in recalled.frames] == list(_frames(_message(7)))
    (stale,) = plan_recall([(append.kind, _payload(append))], next_update=9)
    frames = _frames(_message(7))
    assert [bytes(frame) for frame in stale.frames] == [frames[0], frames[-1]], "its data is of no use"


def test_the_first_record_of_a_fragment_counts():
    message = _message(0)
    journal = Journal(True)
    records = []
    for name in ("first", "second"):
        journal = Journal(True)
        journal.accepted(message.fragment_id, name, _frames(message))
        records += [(item.kind, _payload(item)) for item in journal.take()]
    (recalled,) = plan_recall(records, next_update=3)
    assert recalled.runner_name == "first"


@pytest.mark.parametrize(("max_lag", "reason"), [(0, "stale"), (1, "stale"), (2, None), (-1, None)])
def test_data_is_too_old_by_the_versions_between(max_lag, reason):
    (append,) = _accept(Journal(True), 0)
    (recalled,) = plan_recall([(append.kind, _payload(append))], next_update=5, max_lag=max_lag)
    assert recalled.reason == reason


def test_records_that_cannot_be_are_passed_over_and_those_behind_them_read():
    (append,) = _accept(Journal(True), 0)
    whole = _payload(append)
    frame = _frames(_message(0))[0]
    other = encode_fragment(_message(0), [], None)[0]
    wrong = [
        (FRAGMENT, memoryview(b"1234567")),
        (FRAGMENT, _record()),
        (FRAGMENT, _record(-1, body=b"")),
        (FRAGMENT, _record(4, body=b"12345")),
        (FRAGMENT, _record(6, body=b"12345")),
        (FRAGMENT, _record(5, body=b"12345", num_frames=9)),
        (FRAGMENT, _record(len(frame), body=frame)),
        (FRAGMENT, _record(len(other), body=bytes(other))),
        (FRAGMENT, whole[:-1]),
        (FRAGMENT, memoryview(bytes(whole) + b"x")),
        (TRAINED, memoryview(bytes(11))),
        (TRAINED, memoryview(struct.pack("<qI", 1, 99) + b"r")),
        (9, whole),
    ]
    for record in wrong:
        assert plan_recall([record], next_update=3) == []
    assert len(plan_recall([*wrong, (FRAGMENT, whole)], next_update=3)) == 1


@pytest.mark.parametrize(
    ("update_id", "index", "reason"), [(3, 3, "rejected"), (3, 4, "quarantined"), (4, 4, "quarantined")]
)
def test_poison_of_updates_that_are_undone_stays_poison(update_id, index, reason):
    (append,) = _accept(Journal(True), 0)
    names, table = pack_ranges([FragmentRange(FragmentId("r", 1, 0), index, 0)])
    dropped = struct.pack("<qI", update_id, len(bytes(names))) + bytes(names) + bytes(table)
    (recalled,) = plan_recall(
        [(append.kind, _payload(append)), (DROPPED, memoryview(dropped))], next_update=3
    )
    assert recalled.reason == reason


@pytest.mark.parametrize("index", [0, 7, 99])
def test_other_drops_of_updates_that_are_undone_are_undone(index):
    (append,) = _accept(Journal(True), 0)
    names, table = pack_ranges([FragmentRange(FragmentId("r", 1, 0), index, 0)])
    dropped = struct.pack("<qI", 3, len(bytes(names))) + bytes(names) + bytes(table)
    (recalled,) = plan_recall(
        [(append.kind, _payload(append)), (DROPPED, memoryview(dropped))], next_update=3
    )
    assert recalled.reason is None


# ------------------------------------------------------------------ in the broker


def _journalled() -> Bench:
    bench = Bench(journal=True)
    bench.ready_run()
    bench.runner()
    return bench


def test_a_runner_that_left_before_its_fragment_was_on_disk_is_told_nothing():
    for event in (JournalSynced(99), JournalFailed("full")):
        bench = _journalled()
        bench.fragment(steps=2)
        bench.send("runner", Goodbye("enough"))
        bench.event(event)
        assert bench.sent("runner", Accepted) == []
        assert bench.state.ledger.accounting.pending == 2


def test_an_empty_fragment_that_comes_back_is_reported_and_done():
    bench = _journalled()
    bench.send("driver", Reset(7, 3))
    message = _message(0, steps=0)
    bench.event(JournalRecalled(7, [Recalled(message, "runner-0", _frames(message), None)]))
    assert [fragment.seq for fragment, _, _ in bench.state.to_report] == [0]
    assert bench.state.ledger.entries == {}
    assert [item for item in bench.out if isinstance(item, JournalAppend)] == []


def test_what_comes_back_twice_is_taken_once():
    bench = _journalled()
    bench.send("driver", Reset(7, 3))
    items = [Recalled(_message(0), "runner-0", _frames(_message(0)), None)]
    for _ in range(2):
        bench.event(JournalRecalled(7, items))
    assert bench.state.ledger.accounting.sampled == 10
    assert bench.state.ledger.num_bytes == sum(len(frame) for frame in _frames(_message(0)))
