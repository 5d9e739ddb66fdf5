"""What a rank remembers: until the broker confirms it, until its runners forget it, across ranks."""

from __future__ import annotations

import pytest

from rlzmq.protocol import learner_core
from rlzmq.protocol.learner_core import Done, LearnerMemory
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges
from rlzmq.wire.messages import UpdateDone


def _frames(*ranges: tuple[str, int, int, int]) -> tuple:
    return tuple(
        pack_ranges(FragmentRange(FragmentId(runner, 1, seq), first, n) for runner, seq, first, n in ranges)
    )


def test_steps_of_a_fragment_grow_and_are_told_from_its_first():
    memory = LearnerMemory()
    memory.note_trained(_frames(("a", 0, 0, 10), ("b", 3, 5, 5)))
    memory.note_trained(_frames(("a", 0, 10, 7)))
    memory.note_trained(_frames(("a", 0, 0, 10)))  # told twice
    memory.note_trained(())
    assert set(memory.ranges()) == {
        FragmentRange(FragmentId("a", 1, 0), 0, 17),
        FragmentRange(FragmentId("b", 1, 3), 0, 10),
    }


def test_what_runners_have_forgotten_is_forgotten():
    memory = LearnerMemory()
    memory.note_trained(_frames(("a", 0, 0, 1), ("a", 1, 0, 1), ("b", 0, 0, 1)))
    memory.forget(_frames(("nobody", 9, 0, 0), ("a", 1, 0, 0)))
    assert [item.fragment.seq for item in memory.ranges() if item.fragment.runner == "a"] == [1]
    memory.forget(_frames(("a", 2, 0, 0), ("b", 1, 0, 0)))
    assert memory.ranges() == []


def test_runners_that_never_tell_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_core, "_MAX_REMEMBERED_RUNNERS", 2)
    memory = LearnerMemory()
    for runner in "abac":
        memory.note_trained(_frames((runner, 0, 0, 1)))
    assert {item.fragment.runner for item in memory.ranges()} == {"a", "c"}, "b was not heard of for longest"


def test_a_runner_that_has_forgotten_everything_takes_no_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_core, "_MAX_REMEMBERED_RUNNERS", 2)
    memory = LearnerMemory()
    memory.note_trained(_frames(("a", 0, 0, 1), ("b", 0, 0, 1)))
    memory.forget(_frames(("b", 1, 0, 0)))
    memory.note_trained(_frames(("c", 0, 0, 1)))
    assert {item.fragment.runner for item in memory.ranges()} == {"a", "c"}


def test_another_rank_takes_over_all_of_it():
    memory, other = LearnerMemory(), LearnerMemory()
    memory.note_trained(_frames(("a", 0, 0, 10)))
    for update_id in (4, 5):
        message = UpdateDone(update_id, 1, 2, 0, 2, True, 20)
        memory.done[update_id] = Done(message, (b"results", *_frames(("a", 0, 0, 10))), 7.0)
    own = Done(UpdateDone(5, 1, 2, 1, 2, True, 20), (b"mine",), 8.0)
    other.done[5] = own
    assert other.add(memory.pack(lineage=3)) == 3
    assert other.ranges() == memory.ranges()
    assert other.done[5] is own, "what it has trained itself is its own to tell"
    assert other.done[4].message == memory.done[4].message
    assert other.done[4].payload[0] == b"results"
    assert other.done[4].sent_at == float("-inf"), "it is sent at once"
