"""A learner rank's core: what it says of itself, what it repeats and when, what it does not take."""

from __future__ import annotations

import pytest
from core_fakes import TIMERS, instructions_in, messages_in, receive, welcome

from rlzmq.protocol import core as E
from rlzmq.protocol import learner_core
from rlzmq.protocol.learner_core import LearnerCore, LearnerMemory
from rlzmq.wire import messages as m
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import FragmentRange, pack_ranges, unpack_ranges


def _range(seq: int, first: int = 0, num_steps: int = 5) -> FragmentRange:
    return FragmentRange(FragmentId("r", 1, seq), first, num_steps)


_RANGES = [_range(0), _range(1)]


def _learner(rank=0, num_ranks=2, next_update=0, generation=1, *, is_welcome=True, **options) -> LearnerCore:
    core = LearnerCore("run", f"learner-{rank}", "uuid", timers=TIMERS, **options)
    core.form_group(generation, rank, num_ranks, next_update, 0.0)
    if is_welcome:
        welcome(core)
    return core


def _plan(core, update_id=0, attempt=100, num_fragments=2, **fields):
    fields = {"broker": 5, "generation": 1, **fields}
    ids = fields["broker"], update_id, attempt, fields["generation"]
    made = receive(core, m.ShardPlan(*ids, num_fragments, 5 * num_fragments, 20))
    for index in range(num_fragments):
        shard = m.Shard(*ids, index, FragmentId("r", 1, index), 3, 5)
        made += receive(core, shard, payload=(b"head", b"obs"))
    return made


def _decoded(core, update_id=0, attempt=100, num_fragments=2, now=0.0):
    return [
        item for index in range(num_fragments) for item in core.shard_decoded(update_id, attempt, index, now)
    ]


def _train(core, update_id=0, attempt=100, now=0.0, broker=5):
    message = m.Train(broker, update_id, attempt, core.generation, 20)
    return receive(core, message, now, tuple(pack_ranges(_RANGES)))


def _running(core, update_id=0, attempt=100):
    _plan(core, update_id, attempt)
    _decoded(core, update_id, attempt)
    return _train(core, update_id, attempt)


def _trained(core, update_id=0, attempt=100, now=0.0, **fields):
    return core.update_trained(update_id, attempt, True, 20, b"results", now)


def _state(core) -> m.LearnerState:
    core._state_at = float("-inf")
    return messages_in(core.tick(0.0), m.LearnerState)[0]


def _hello(core, now=0.0) -> tuple[m.Hello, list[list[FragmentRange]]]:
    """Its HELLO now, and what its payload says."""
    (send,) = [i for i in core.start(now) if isinstance(i, E.Send)]
    payload = send.payload
    return send.message, [unpack_ranges(payload[i : i + 2]) for i in range(0, len(payload), 2)]


# ------------------------------------------------------------------ what it takes


def test_a_refused_shard_is_not_held_any_more_and_its_text_is_cut():
    core = _learner()
    _plan(core)
    (refused,) = messages_in(core.shard_failed(0, 100, 1, "dtype", "x" * 2000), m.ShardRefused)
    assert refused == m.ShardRefused(0, 100, 1, FragmentId("r", 1, 1), "dtype", "x" * 1000)
    assert _state(core).num_held == (1,)
    for attempt, index in ((100, 1), (99, 0)):
        assert core.shard_failed(0, attempt, index, "dtype", "again") == []
    assert [item.shard.index for item in instructions_in(_plan(core), E.DecodeShard)] == [1], "sent again"


# ------------------------------------------------------------------ generations


def test_a_confirmed_update_is_forgotten_only_if_it_is_of_this_generation():
    core = _learner()
    _running(core)
    _trained(core)
    receive(core, m.UpdateCommitted(0, 0), 0.0, tuple(pack_ranges([])))
    assert messages_in(core.tick(2.0), m.UpdateDone)
    receive(core, m.UpdateCommitted(0, 1), 2.0, tuple(pack_ranges([])))
    assert messages_in(core.tick(4.0), m.UpdateDone) == []


def test_what_runners_no_longer_hold_is_forgotten():
    core = _learner()
    _running(core)
    _trained(core)
    for held, remembered in ((1, [_range(1)]), (2, [])):
        still_held = FragmentRange(FragmentId("r", 1, held), 0, 0)
        receive(core, m.UpdateCommitted(0, 0), 0.0, tuple(pack_ranges([still_held])))
        assert _hello(core)[1] == [remembered]


# ------------------------------------------------------------------ weights


def test_weights_are_sent_to_who_has_older_ones():
    core = _learner()
    assert receive(core, m.SnapshotRequest(-1, -1)) == [], "there are none yet"
    core.new_weights(1, 4, b"frame")
    asked = {(0, 9): True, (1, 3): True, (1, 4): False, (2, 0): False}
    for order, is_sent in asked.items():
        assert bool(receive(core, m.SnapshotRequest(*order))) is is_sent


def test_a_decoded_shard_may_be_refused_until_its_update_is_complete():
    core = _learner()
    _plan(core)
    core.shard_decoded(0, 100, 0, 0.0)
    assert core.is_receiving(0, 100)
    assert messages_in(core.shard_failed(0, 100, 0, "unusable", "its form"), m.ShardRefused)
    assert not messages_in(core.shard_decoded(0, 100, 1, 0.0), m.ShardReady)
    other = _learner()
    _plan(other)
    _decoded(other)
    assert not other.is_receiving(0, 100)


def _frames(*ranges: tuple[str, int, int, int]) -> tuple:
    return tuple(
        pack_ranges(FragmentRange(FragmentId(runner, 1, seq), first, n) for runner, seq, first, n in ranges)
    )


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
