"""A learner rank's core: what it says of itself, what it repeats and when, what it does not take."""

from __future__ import annotations

import pytest
from core_fakes import TIMERS, instructions_in, messages_in, receive, welcome

from rlzmq.protocol import events as E
from rlzmq.protocol.learner_core import LearnerCore
from rlzmq.wire import messages as m
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges, unpack_ranges
from rlzmq.wire.schema import FragmentId


def _range(seq: int, first: int = 0, num_steps: int = 5) -> FragmentRange:
    return FragmentRange(FragmentId("r", 1, seq), first, num_steps)


_RANGES = [_range(0), _range(1)]


def _learner(rank=0, num_ranks=2, next_update=0, generation=1, *, is_welcome=True, **options) -> LearnerCore:
    core = LearnerCore("run", f"learner-{rank}", "uuid", timers=TIMERS, **options)
    core.handle(E.GroupFormed(generation, rank, num_ranks, next_update), 0.0)
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
        item
        for index in range(num_fragments)
        for item in core.handle(E.ShardDecoded(update_id, attempt, index), now)
    ]


def _train(core, update_id=0, attempt=100, now=0.0, broker=5):
    message = m.Train(broker, update_id, attempt, core.generation, 20)
    return receive(core, message, now, tuple(pack_ranges(_RANGES)))


def _running(core, update_id=0, attempt=100):
    _plan(core, update_id, attempt)
    _decoded(core, update_id, attempt)
    return _train(core, update_id, attempt)


def _trained(core, update_id=0, attempt=100, now=0.0, **fields):
    return core.handle(E.UpdateTrained(update_id, attempt, True, 20, b"results", **fields), now)


def _ticks(core, kind, until):
    """When messages of a kind are sent, looked at every quarter of a second; the broker is heard all along."""
    at = []
    for quarters in range(1, int(until * 4) + 1):
        at += [quarters / 4 for _ in messages_in(core.handle(E.Tick(), quarters / 4), kind)]
        receive(core, m.BrokerBeat(5), quarters / 4)
    return at


def _state(core) -> m.LearnerState:
    core._state_at = float("-inf")
    return messages_in(core.handle(E.Tick(), 0.0), m.LearnerState)[0]


def _hello(core, now=0.0) -> tuple[m.Hello, list[list[FragmentRange]]]:
    """Its HELLO now, and what its payload says."""
    (send,) = [i for i in core.start(now) if isinstance(i, E.Send)]
    payload = send.payload
    return send.message, [unpack_ranges(payload[i : i + 2]) for i in range(0, len(payload), 2)]


# ------------------------------------------------------------------ what it says of itself


def test_hello_says_who_it_is_and_what_it_is_told_to_train():
    core = LearnerCore("run", "learner-1", "uuid")
    (send,) = core.handle(E.GroupFormed(3, 1, 2, 7), 0.0)
    fields = {"run_id": "run", "generation": 3}
    place = {"rank": 1, "num_ranks": 2, "next_update": 7}
    assert send.message == m.Hello("learner", "learner-1", "uuid", 1, **fields, **place)
    assert unpack_ranges(send.payload) == []
    core = _learner()
    _running(core)
    _trained(core)
    _running(core, 1, 101)
    _plan(core, 2, 102)
    hello, (memory, training) = _hello(core)
    assert (hello.incarnation, hello.next_update) == (1, 1)
    assert (hello.training_updates, hello.training_attempts) == ((1,), (101,))
    assert memory == training == _RANGES


def test_its_heartbeat_says_what_it_holds():
    core = _learner()
    assert _state(core) == m.LearnerState(1, 0, (), (), (), (), 0)
    _plan(core, 1, 101, num_fragments=1)
    _decoded(core, 1, 101, num_fragments=1)
    _plan(core, 0, 100)
    _plan(core, 2, 102, num_fragments=3)
    core.progress = 9
    assert _state(core) == m.LearnerState(1, 0, (0, 1, 2), (100, 101, 102), (2, 1, 3), (0, 1, 0), 9)
    _decoded(core)
    _train(core)
    assert _state(core).phases == (2, 1, 0)
    assert (core.running_update, core.num_waiting_updates) == (0, 2)
    assert core.training_ranges(0) == _RANGES
    assert core.training_ranges(1) == core.training_ranges(9) == []
    _trained(core)
    assert (core.running_update, core.num_waiting_updates) == (None, 2)
    assert _state(core).next_update == 1


def test_instructions_carry_what_the_plan_says():
    core = _learner()
    first, second = instructions_in(_plan(core), E.DecodeShard)
    assert first == E.DecodeShard(0, 100, 0, FragmentId("r", 1, 0), 3, 5, (b"head", b"obs"))
    assert (second.index, second.fragment.seq) == (1, 1)
    assert _plan(core) == [], "what comes twice is decoded once"
    assert messages_in(_decoded(core), m.ShardReady) == [m.ShardReady(0, 100, 1, 0)]
    assert _train(core) == [E.RunUpdate(0, 100, 2, 10, 20)]


def test_done_says_what_was_trained():
    core = _learner(rank=1)
    _running(core)
    (send,) = _trained(core)
    assert send.message == m.UpdateDone(0, 100, 1, 1, 2, True, 20)
    assert send.payload[0] == b"results"
    assert unpack_ranges(send.payload[1:3]) == _RANGES


# ------------------------------------------------------------------ what it repeats


def test_its_heartbeat_comes_at_the_brokers_pace():
    assert _ticks(_learner(), m.LearnerState, 2.5) == [1.0, 2.0]


@pytest.mark.parametrize("generation", [0, 1])
def test_it_registers_again_once_a_group_stands(generation):
    core = _learner(generation=generation, is_welcome=False)
    assert messages_in(core.handle(E.Tick(), 1.0), m.Hello)


def test_ready_is_said_again_until_train_comes():
    core = _learner()
    _plan(core)
    _decoded(core)
    assert _ticks(core, m.ShardReady, 5.0) == [2.0, 4.0]
    _train(core, now=5.0)
    assert _ticks(core, m.ShardReady, 9.0) == []


def test_done_is_said_again_at_its_pace():
    core = _learner()
    _running(core)
    _trained(core)
    assert _ticks(core, m.UpdateDone, 5.0) == [2.0, 4.0]


def test_nothing_is_repeated_to_a_broker_that_does_not_know_it():
    core = _learner()
    _running(core)
    _trained(core)
    _plan(core, 1, 101)
    _decoded(core, 1, 101)
    receive(core, m.BrokerBeat(6))
    out = core.handle(E.Tick(), 5.0)
    assert [type(item.message) for item in out] == [m.Hello]


def test_a_new_broker_hears_at_once_what_is_done_and_what_is_ready():
    core = _learner()
    _running(core)
    _trained(core)
    _running(core, 1, 101)
    _plan(core, 2, 102)
    _decoded(core, 2, 102)
    _train(core, 2, 102)
    receive(core, m.BrokerBeat(6))
    out = welcome(core, 1.0, broker=6)
    assert [done.update_id for done in messages_in(out, m.UpdateDone)] == [0]
    assert [ready.update_id for ready in messages_in(out, m.ShardReady)] == [2], "1 is being trained"
    again = core.handle(E.Tick(), 2.75)
    assert messages_in(again, m.UpdateDone) == messages_in(again, m.ShardReady) == []
    again = core.handle(E.Tick(), 3.0)
    assert len(messages_in(again, m.UpdateDone)) == len(messages_in(again, m.ShardReady)) == 1
    assert core.training_ranges(2) == [], "the new broker says TRAIN again if it stands"
    assert core.training_ranges(1) == _RANGES


# ------------------------------------------------------------------ what it takes


@pytest.mark.parametrize(
    "fields", [{"generation": 0}, {"generation": 2}, {"broker": 4}, {"broker": 6}, {"update_id": 2}]
)
def test_plans_that_are_not_for_it_now_are_ignored(fields):
    core = _learner(next_update=3)
    assert _plan(core, **{"update_id": 3, **fields}) == []
    assert _state(core).update_ids == ()
    assert _plan(core, 3)


def test_messages_for_other_roles_are_ignored():
    assert receive(_learner(), m.Accepted(1, ())) == []


def test_nothing_is_taken_before_its_hello_is_answered():
    core = _learner(is_welcome=False)
    assert _plan(core) == []
    assert _plan(core, broker=-1) == []


def test_decoded_shards_count_only_where_they_belong():
    core = _learner()
    _plan(core)
    for update_id, attempt, index in ((0, 99, 0), (1, 100, 0), (0, 100, 2), (0, 100, 0)):
        assert core.handle(E.ShardDecoded(update_id, attempt, index), 0.0) == []
    assert messages_in(core.handle(E.ShardDecoded(0, 100, 1), 0.0), m.ShardReady)


def test_a_refused_shard_is_not_held_any_more_and_its_text_is_cut():
    core = _learner()
    _plan(core)
    (refused,) = messages_in(core.handle(E.ShardFailed(0, 100, 1, "dtype", "x" * 2000), 0.0), m.ShardRefused)
    assert refused == m.ShardRefused(0, 100, 1, FragmentId("r", 1, 1), "dtype", "x" * 1000)
    assert _state(core).num_held == (1,)
    for attempt, index in ((100, 1), (99, 0)):
        assert core.handle(E.ShardFailed(0, attempt, index, "dtype", "again"), 0.0) == []
    assert [item.index for item in instructions_in(_plan(core), E.DecodeShard)] == [1], "sent again"


def test_an_empty_shard_is_ready_at_once():
    core = _learner()
    assert messages_in(_plan(core, num_fragments=0), m.ShardReady) == [m.ShardReady(0, 100, 1, 0)]


def test_train_for_another_attempt_starts_nothing():
    core = _learner()
    _plan(core)
    _decoded(core)
    assert _train(core, attempt=99) == _train(core, attempt=101) == []
    assert _train(core)


def test_results_of_what_is_not_being_trained_are_ignored():
    core = _learner()
    _plan(core, 1, 101)
    _running(core)
    for update_id, attempt in ((0, 99), (1, 101), (7, 100)):
        assert _trained(core, update_id, attempt) == []
    assert core.running_update == 0
    assert messages_in(_trained(core), m.UpdateDone)
    assert core.running_update is None


def test_a_stopped_rank_does_nothing():
    core = _learner()
    assert core.handle(E.Leave("enough"), 0.0) == [
        E.Send(b"", m.Goodbye("enough")),
        E.Stop("left", "enough"),
    ]
    assert core.handle(E.Tick(), 9.0) == core.handle(E.GroupFormed(2, 0, 1, 0), 9.0) == []


@pytest.mark.parametrize(
    ("reason", "generation", "stops"),
    [("fenced", 2, False), ("fenced", 3, True), ("expelled", 2, True), ("config_digest", 3, True)],
)
def test_only_the_fencing_of_a_past_generation_is_ignored(reason, generation, stops):
    core = _learner(generation=3)
    out = receive(core, m.Refused(reason, "detail", generation))
    assert out == ([E.Stop(reason, "detail")] if stops else [])


# ------------------------------------------------------------------ generations


def test_a_generation_never_falls_or_stays():
    core = _learner(generation=3)
    for generation in (2, 3):
        with pytest.raises(ValueError, match=f"generation {generation} is not above 3"):
            core.handle(E.GroupFormed(generation, 0, 1, 0), 0.0)


def test_the_group_has_trained_what_was_at_hand_below_its_next_update():
    core = _learner()
    _running(core)
    _plan(core, 1, 101)
    out = core.handle(E.GroupFormed(2, 0, 2, 1), 0.0)
    dropped = {(item.update_id, item.attempt) for item in instructions_in(out, E.DropShards)}
    assert dropped == {(0, 100), (1, 101)}
    _, (memory,) = _hello(core)
    assert memory == _RANGES
    assert core.running_update is None


def test_an_update_that_the_group_has_yet_to_train_is_not_remembered_as_trained():
    core = _learner()
    _running(core)
    core.handle(E.GroupFormed(2, 0, 2, 0), 0.0)
    assert _hello(core)[1] == [[]]


def test_a_step_that_the_groups_state_lacks_did_not_survive():
    core = _learner()
    _running(core)
    _trained(core)
    _running(core, 1, 101)
    _trained(core, 1, 101)
    core.handle(E.GroupFormed(2, 1, 3, 1), 0.0)
    (done,) = messages_in(welcome(core, broker=6), m.UpdateDone)
    assert done == m.UpdateDone(0, 100, 2, 1, 2, True, 20), "two ranks trained what the new group has"
    assert core.next_update == 1


def test_a_confirmed_update_is_forgotten_only_if_it_is_of_this_generation():
    core = _learner()
    _running(core)
    _trained(core)
    receive(core, m.UpdateCommitted(0, 0), 0.0, tuple(pack_ranges([])))
    assert messages_in(core.handle(E.Tick(), 2.0), m.UpdateDone)
    receive(core, m.UpdateCommitted(0, 1), 2.0, tuple(pack_ranges([])))
    assert messages_in(core.handle(E.Tick(), 4.0), m.UpdateDone) == []
    receive(core, m.UpdateCommitted(0, 1), 4.0, tuple(pack_ranges([])))


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("rank", "generation", "is_welcome", "is_sent"),
    [(0, 1, True, True), (1, 1, True, False), (0, 2, True, False), (0, 1, False, False)],
)
def test_only_rank_0_sends_weights_of_its_generation_to_a_broker_that_knows_it(
    rank, generation, is_welcome, is_sent
):
    core = _learner(rank, is_welcome=is_welcome)
    out = core.handle(E.NewWeights(generation, 4, b"frame"), 0.0)
    assert out == ([E.Send(b"", m.Weights(1, 4), (b"frame",))] if is_sent else [])


def test_weights_are_sent_to_who_has_older_ones():
    core = _learner()
    assert receive(core, m.SnapshotRequest(-1, -1)) == [], "there are none yet"
    core.handle(E.NewWeights(1, 4, b"frame"), 0.0)
    asked = {(0, 9): True, (1, 3): True, (1, 4): False, (2, 0): False}
    for order, is_sent in asked.items():
        assert bool(receive(core, m.SnapshotRequest(*order))) is is_sent


def test_a_decoded_shard_may_be_refused_until_its_update_is_complete():
    core = _learner()
    _plan(core)
    core.handle(E.ShardDecoded(0, 100, 0), 0.0)
    assert core.is_receiving(0, 100)
    assert messages_in(core.handle(E.ShardFailed(0, 100, 0, "unusable", "its form"), 0.0), m.ShardRefused)
    assert not messages_in(core.handle(E.ShardDecoded(0, 100, 1), 0.0), m.ShardReady)
    other = _learner()
    _plan(other)
    _decoded(other)
    assert not other.is_receiving(0, 100)
