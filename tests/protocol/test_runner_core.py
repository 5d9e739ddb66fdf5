"""A runner's core: what it says of itself, what it repeats and when, what it gives back."""

from __future__ import annotations

import itertools

import pytest
from core_fakes import TIMERS, instructions_in, messages_in, publication, receive, welcome

from rlzmq.protocol import events as E
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.wire import messages as m
from rlzmq.wire.errors import WireError


def _runner(*, is_welcome: bool = True, **options) -> RunnerCore:
    core = RunnerCore("run", "runner", "uuid", num_envs=4, timers=TIMERS, **options)
    core.start(0.0)
    if is_welcome:
        welcome(core)
    return core


def _ready(**options) -> RunnerCore:
    core = _runner(**options)
    core.handle(E.ReceivedWeights(publication(0)), 0.0)
    return core


def _lease(lease_id=1, version=0, generation=1, exact=True, **fields) -> m.Lease:
    fields = {"connector_version": -1, "timeout_s": 30.0, **fields}
    return m.Lease(lease_id, 0 if exact else -1, 5, generation, version, exact, **fields)


def _sampled(core, lease_id=1, now=0.0, **fields):
    return core.handle(E.FragmentSampled(lease_id, 20, 1, 0, **fields), now)


def _deliver(core, *lease_ids, now=0.0):
    for lease_id in lease_ids:
        receive(core, _lease(lease_id), now)
        _sampled(core, lease_id, now)


def _state(core) -> m.RunnerState:
    """Its next heartbeat."""
    core._state_at = float("-inf")
    return messages_in(core.handle(E.Tick(), 0.0), m.RunnerState)[0]


# ------------------------------------------------------------------ what it says of itself


def test_hello_says_who_it_is_and_what_it_holds():
    digests = {"config_digest": "config", "spaces_digest": "spaces", "package_version": "1.2"}
    core = RunnerCore("run", "runner-3", "uuid", num_envs=4, incarnation=7, replaces="old", **digests)
    fields = {"incarnation": 7, "run_id": "run", "num_envs": 4, "replaces": "old", **digests}
    assert core.start(0.0) == [E.Send(b"", m.Hello("runner", "runner-3", "uuid", 1, **fields), ())]
    welcome(core)
    core.handle(E.ReceivedWeights(publication(0)), 0.0)
    _deliver(core, 1, 2, 3)
    receive(core, m.Committed(1, 2, ()))
    (hello,) = messages_in(core.start(0.0), m.Hello)
    assert (hello.incarnation, hello.first_unacked, hello.next_seq, hello.hello_id) == (1, 2, 3, 2)


def test_its_heartbeat_says_what_it_holds_and_does():
    core = _runner()
    assert _state(core) == m.RunnerState(0, 0, (), (), False, -1, -1, -1, 0, 0)
    core.handle(E.ReceivedWeights(publication(3, generation=2)), 0.0)
    receive(core, m.ConnectorState(6), payload=(b"state",))
    assert _state(core).connector_version == -1, "it applies a state with its next lease"
    for lease_id in (8, 9):
        receive(core, _lease(lease_id, exact=False))
    core.progress = 11
    assert _state(core) == m.RunnerState(0, 0, (), (9, 8), True, 2, 3, 6, 11, 0)
    _sampled(core, 8)
    assert _state(core) == m.RunnerState(0, 1, ((0, 0),), (9,), True, 2, 3, 6, 11, 20)
    receive(core, m.Accepted(1, ((0, 0),)))
    assert _state(core).unaccepted == ()
    receive(core, m.Committed(1, 1, ()))
    assert _state(core).first_unacked == 1


def test_what_it_holds_can_be_looked_at():
    core = _ready()
    assert (core.num_unacked, core.unacked_bytes, core.current_lease) == (0, 0, None)
    receive(core, _lease(1))
    assert core.current_lease == _lease(1)
    (send,) = instructions_in(_sampled(core), E.Send)
    (frames,) = [send.frames]
    assert core.unacked_bytes == sum(memoryview(frame).nbytes for frame in frames) > 0
    assert core.kept_fragments() == {0: (send.message, False)}
    receive(core, m.Accepted(1, ((0, 0),)))
    assert core.kept_fragments() == {0: (send.message, True)}


def test_it_waits_for_weights_only_while_a_lease_asks_for_some():
    core = _ready()
    assert not core.is_waiting_for_weights
    receive(core, _lease(1))
    receive(core, _lease(2, version=1))
    assert not core.is_waiting_for_weights, "it samples"
    _sampled(core)
    assert core.is_waiting_for_weights
    core.handle(E.ReceivedWeights(publication(1)), 0.0)
    assert not core.is_waiting_for_weights


def test_a_fragment_says_what_it_was_sampled_with():
    core = _ready()
    receive(core, _lease(4))
    (fragment,) = messages_in(_sampled(core, 4, connector_version=6, batch={"columns": []}), m.Fragment)
    assert fragment == m.Fragment("uuid", 1, 0, 4, 20, 1, 0, 6, {"columns": []})


def test_a_lease_starts_with_what_it_says():
    core = _ready()
    (start,) = instructions_in(receive(core, _lease(4, max_s=2.5)), E.StartLease)
    assert start == E.StartLease(4, 0, 5, 1, 0, -1, 2.5)


# ------------------------------------------------------------------ what it repeats


def test_a_fragment_is_sent_again_at_its_pace():
    core = _ready()
    receive(core, _lease(1), 1.0)
    _sampled(core, now=1.0)
    repeats = []
    for quarters in range(4, 60):
        made = core.handle(E.Tick(), quarters / 4)
        repeats += [quarters / 4 for _ in messages_in(made, m.Fragment)]
        receive(core, m.BrokerBeat(5), quarters / 4)
    assert repeats == [3.0, 7.0, 13.0], "it waits longer each time"


def test_on_a_slow_path_a_fragment_is_not_sent_again_while_it_travels():
    core = _ready()
    for number in (1, 2):
        receive(core, _lease(number), 10.0 * number)
        _sampled(core, lease_id=number, now=10.0 * number)
        receive(core, m.Accepted(1, ((number - 1, number - 1),)), 10.0 * number + 1.9)
    receive(core, _lease(3), 30.0)
    _sampled(core, lease_id=3, now=30.0)
    assert messages_in(core.handle(E.Tick(), 39.0), m.Fragment) == []
    assert len(messages_in(core.handle(E.Tick(), 39.6), m.Fragment)) == 1


def test_a_fragment_sampled_before_the_broker_knows_its_runner_is_sent_once_it_does():
    core = _ready()
    receive(core, _lease(1))
    receive(core, m.BrokerBeat(6))
    assert instructions_in(_sampled(core), E.Send) == []
    assert messages_in(core.handle(E.Tick(), 1.0), m.Fragment) == []
    assert len(messages_in(welcome(core, 1.0, broker=6), m.Fragment)) == 1
    assert messages_in(core.handle(E.Tick(), 2.5), m.Fragment) == []
    assert len(messages_in(core.handle(E.Tick(), 3.0), m.Fragment)) == 1


def test_a_fragment_sampled_while_a_broker_was_silent_is_sent_when_that_broker_answers():
    core = _ready()
    receive(core, _lease(1))
    core.handle(E.Tick(), 3.0)
    assert not core.is_welcome
    assert instructions_in(_sampled(core, now=3.0), E.Send) == []
    assert messages_in(welcome(core, 3.0), m.Fragment) == []
    assert len(messages_in(core.handle(E.Tick(), 3.25), m.Fragment)) == 1


def test_a_new_broker_gets_what_the_last_one_had_accepted_until_it_accepts_it_too():
    core = _ready()
    _deliver(core, 1)
    receive(core, m.Accepted(1, ((0, 0),)))
    receive(core, m.BrokerBeat(6))
    welcome(core, 0.0, broker=6)
    assert [f.seq for f in messages_in(core.handle(E.Tick(), 2.0), m.Fragment)] == [0]
    receive(core, m.Accepted(1, ((0, 0),)), 2.0)
    assert messages_in(core.handle(E.Tick(), 4.0), m.Fragment) == []


def test_weights_are_asked_for_again_when_they_take_longer_than_they_ever_have():
    core = _ready()
    receive(core, _lease(version=1, exact=False, timeout_s=1e9))
    asked = []
    for step in range(1, 10 * 32):
        now = step / 32
        asked += [now for _ in messages_in(core.handle(E.Tick(), now), m.SnapshotRequest)]
        receive(core, m.BrokerBeat(5), now)
    gaps = {later - earlier for earlier, later in itertools.pairwise(asked)}
    assert asked[0] == 2 / 32
    assert gaps == {2.0}, "until it is known how long they take"
    now = 40.0
    receive(core, m.Snapshot(1, 1), now, (publication(1),))
    _sampled(core, now=now)
    receive(core, _lease(2, version=2, exact=False), now)
    assert messages_in(core.handle(E.Tick(), now + 0.0625), m.SnapshotRequest), "soon again: they came"


def test_a_request_names_what_is_here_already():
    core = _ready()
    receive(core, m.ConnectorState(3), payload=(b"state",))
    receive(core, _lease(connector_version=4))
    (request,) = messages_in(core.handle(E.Tick(), 1.0), m.SnapshotRequest)
    assert request == m.SnapshotRequest(1, 0, 3)


# ------------------------------------------------------------------ what it takes


def test_accepted_and_committed_of_another_incarnation_are_not_its_own():
    core = _ready()
    _deliver(core, 1)
    receive(core, m.Accepted(2, ((0, 0),)))
    receive(core, m.Committed(2, 1, ()))
    assert [accepted for _, accepted in core.kept_fragments().values()] == [False]


def test_a_lease_brings_acknowledgements():
    core = _ready()
    _deliver(core, 1, 2)
    receive(core, _lease(3, accepted=((1, 1),)))
    assert {seq: accepted for seq, (_, accepted) in core.kept_fragments().items()} == {0: False, 1: True}


@pytest.mark.parametrize("span", [(1, 3), (1, 6), (1, 2**60)])
def test_spans_of_any_length_mean_what_lies_within(span):
    core = _ready()
    _deliver(core, *range(1, 9))
    receive(core, m.Committed(1, 0, (span,)))
    assert list(core.kept_fragments()) == [seq for seq in range(8) if not span[0] <= seq <= span[1]]


def test_what_is_rejected_is_counted_and_not_kept():
    core = _ready()
    _deliver(core, 1, 2)
    for seq in (0, -1):
        receive(core, m.Rejected(seq, "stale", "too old"))
    assert core.rejected == {"stale": 2}
    assert list(core.kept_fragments()) == [1]


def test_damaged_weights_are_counted_and_leave_the_others():
    core = _ready()
    for _ in range(2):
        core.handle(E.ReceivedWeights(b"x" * 600), 0.0)
    assert sum(core.weights.refused.values()) == 2
    assert instructions_in(receive(core, _lease()), E.StartLease)


def test_only_a_newer_connector_state_replaces_one():
    core = _ready()
    for version, blob in ((3, b"three"), (3, b"again"), (2, b"two")):
        receive(core, m.ConnectorState(version), payload=(blob,))
    (applied,) = instructions_in(receive(core, _lease(1)), E.ApplyConnectorState)
    assert (applied.version, applied.blob) == (3, b"three")
    receive(core, m.ConnectorState(3), payload=(b"again",))
    receive(core, _lease(2, connector_version=3))
    assert instructions_in(_sampled(core), E.ApplyConnectorState) == []
    assert core.current_lease is not None, "what was applied counts"


def test_weights_are_applied_once():
    core = _ready()
    assert len(instructions_in(receive(core, _lease(1)), E.ApplyWeights)) == 1
    receive(core, _lease(2))
    instructions = _sampled(core)
    assert instructions_in(instructions, E.StartLease)
    assert instructions_in(instructions, E.ApplyWeights) == []


def test_acknowledgements_of_huge_spans_cost_nothing():
    core = _ready()
    _deliver(core, 1, 2)
    receive(core, m.Accepted(1, ((-(2**40), 2**40),)))
    assert _state(core).unaccepted == ()


def test_messages_without_their_payload_change_nothing():
    core = _ready()
    assert receive(core, m.Snapshot(1, 1)) == receive(core, m.ConnectorState(1)) == []
    assert (core.weights.version, core.connector_version) == (0, -1)


def test_ended_leases_are_remembered_up_to_a_number():
    core = _ready()
    _deliver(core, *range(1, 301))
    assert receive(core, _lease(300)) == receive(core, _lease(45)) == []
    assert instructions_in(receive(core, _lease(44)), E.StartLease), "of long ago"


# ------------------------------------------------------------------ what it gives back


def test_a_lease_that_waited_for_its_whole_time_is_given_back():
    core = _ready()
    receive(core, _lease(version=1, timeout_s=10.0), 1.0)
    receive(core, m.BrokerBeat(5), 10.5)
    assert messages_in(core.handle(E.Tick(), 10.75), m.LeaseReturned) == []
    assert messages_in(core.handle(E.Tick(), 11.0), m.LeaseReturned) == [m.LeaseReturned(1, "outdated")]


def test_leases_behind_one_that_is_given_back_are_looked_at_too():
    core = _ready()
    receive(core, _lease(1))
    for lease_id in (2, 3):
        receive(core, _lease(lease_id))
    receive(core, _lease(4, version=1))
    core.handle(E.ReceivedWeights(publication(1)), 0.0)
    made = _sampled(core)
    assert [item.lease_id for item in messages_in(made, m.LeaseReturned)] == [2, 3]
    assert [item.lease_id for item in instructions_in(made, E.StartLease)] == [4]


@pytest.mark.parametrize(
    ("have", "lease", "fate"),
    [
        ((1, 5), {"version": 5}, "started"),
        ((1, 6), {"version": 5}, "returned"),
        ((1, 6), {"version": 5, "exact": False}, "started"),
        ((1, 4), {"version": 5}, "waits"),
        ((2, 5), {"version": 5}, "started"),
        ((2, 4), {"version": 5}, "returned"),
        ((2, 4), {"version": 5, "exact": False}, "returned"),
        ((2, 6), {"version": 5, "exact": False}, "started"),
        ((1, 9), {"version": 5, "generation": 2}, "waits"),
    ],
)
def test_the_past_is_given_back_and_the_future_waited_for(have, lease, fate):
    core = _runner()
    core.handle(E.ReceivedWeights(publication(have[1], generation=have[0])), 0.0)
    out = receive(core, _lease(**lease))
    fates = {
        "started": bool(instructions_in(out, E.StartLease)),
        "returned": bool(messages_in(out, m.LeaseReturned)),
        "waits": core.is_waiting_for_weights,
    }
    assert [name for name, is_so in fates.items() if is_so] == [fate]


def test_the_reason_of_a_failed_lease_is_cut():
    core = _ready()
    receive(core, _lease())
    (returned,) = messages_in(core.handle(E.LeaseFailed(1, "x" * 600), 0.0), m.LeaseReturned)
    assert returned == m.LeaseReturned(1, "x" * 500)
    with pytest.raises(ValueError, match="not started"):
        core.handle(E.LeaseFailed(1, "again"), 0.0)


def test_what_is_at_work_is_the_only_thing_that_can_end():
    core = _ready()
    receive(core, _lease(1))
    for event in (E.FragmentSampled(2, 20, 1, 0), E.LeaseFailed(2, "x")):
        with pytest.raises(ValueError, match="lease 2"):
            core.handle(event, 0.0)


def test_a_fragment_that_does_not_fit_into_a_message_is_no_refused_message():
    core = _ready()
    receive(core, _lease(1))
    with pytest.raises(
        ValueError, match="fragment cannot be sent: a header has at most 65536 bytes"
    ) as caught:
        _sampled(core, batch={"meta": "x" * 70_000})
    assert not isinstance(caught.value, WireError)


def test_who_is_leaving_takes_no_more_leases_and_waits_until_all_is_accepted():
    core = _ready()
    _deliver(core, 1)
    receive(core, _lease(2))
    assert messages_in(core.handle(E.Leave("enough"), 0.0), m.Goodbye) == []
    assert receive(core, _lease(3)) == []
    assert messages_in(_sampled(core, 2), m.Goodbye) == []
    assert receive(core, m.Accepted(1, ((0, 0),))) == []
    assert receive(core, m.Accepted(1, ((1, 1),))) == [
        E.Send(b"", m.Goodbye("enough")),
        E.Stop("left", "enough"),
    ]
    assert core.handle(E.Tick(), 9.0) == []


def test_who_holds_nothing_leaves_at_once():
    core = _runner()
    assert core.handle(E.Leave("enough"), 0.0) == [
        E.Send(b"", m.Goodbye("enough")),
        E.Stop("left", "enough"),
    ]
