"""A runner's core: what it says of itself, what it repeats and when, what it gives back."""

from __future__ import annotations

import itertools

import pytest
from core_fakes import TIMERS, instructions_in, messages_in, publication, receive, welcome

from rlzmq.protocol import core as E
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.wire import messages as m
from rlzmq.wire.codec import WireError


def _runner(*, is_welcome: bool = True, **options) -> RunnerCore:
    core = RunnerCore("run", "runner", "uuid", num_envs=4, timers=TIMERS, **options)
    core.start(0.0)
    if is_welcome:
        welcome(core)
    return core


def _ready(**options) -> RunnerCore:
    core = _runner(**options)
    core.take_weights(publication(0), 0.0)
    return core


def _lease(lease_id=1, version=0, generation=1, exact=True, **fields) -> m.Lease:
    fields = {"connector_version": -1, "timeout_s": 30.0, **fields}
    return m.Lease(lease_id, 0 if exact else -1, 5, generation, version, exact, **fields)


def _sampled(core, lease_id=1, now=0.0, **fields):
    return core.sampled(lease_id, 20, 1, 0, now, **fields)


def _deliver(core, *lease_ids, now=0.0):
    for lease_id in lease_ids:
        receive(core, _lease(lease_id), now)
        _sampled(core, lease_id, now)


# ------------------------------------------------------------------ what it repeats


def test_weights_are_asked_for_again_when_they_take_longer_than_they_ever_have():
    core = _ready()
    receive(core, _lease(version=1, exact=False, timeout_s=1e9))
    asked = []
    for step in range(1, 10 * 32):
        now = step / 32
        asked += [now for _ in messages_in(core.tick(now), m.SnapshotRequest)]
        receive(core, m.BrokerBeat(5), now)
    gaps = {later - earlier for earlier, later in itertools.pairwise(asked)}
    assert asked[0] == 2 / 32
    assert gaps == {2.0}, "until it is known how long they take"
    now = 40.0
    receive(core, m.Snapshot(1, 1), now, (publication(1),))
    _sampled(core, now=now)
    receive(core, _lease(2, version=2, exact=False), now)
    assert messages_in(core.tick(now + 0.0625), m.SnapshotRequest), "soon again: they came"


# ------------------------------------------------------------------ what it takes


def test_damaged_weights_are_counted_and_leave_the_others():
    core = _ready()
    for _ in range(2):
        core.take_weights(b"x" * 600, 0.0)
    assert sum(core.weights.refused.values()) == 2
    assert instructions_in(receive(core, _lease()), E.StartLease)


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
    assert messages_in(core.tick(10.75), m.LeaseReturned) == []
    assert messages_in(core.tick(11.0), m.LeaseReturned) == [m.LeaseReturned(1, "outdated")]


def test_the_reason_of_a_failed_lease_is_cut():
    core = _ready()
    receive(core, _lease())
    (returned,) = messages_in(core.lease_failed(1, "x" * 600, 0.0), m.LeaseReturned)
    assert returned == m.LeaseReturned(1, "x" * 500)
    with pytest.raises(ValueError, match="not started"):
        core.lease_failed(1, "again", 0.0)


def test_a_fragment_that_does_not_fit_into_a_message_is_no_refused_message():
    core = _ready()
    receive(core, _lease(1))
    with pytest.raises(
        ValueError, match="fragment cannot be sent: a header has at most 65536 bytes"
    ) as caught:
        _sampled(core, batch={"meta": "x" * 70_000})
    assert not isinstance(caught.value, WireError)


# ------------------------------------------------------------------ runner


def test_a_lease_waits_for_its_connector_state():
    core = _ready()
    receive(core, m.ConnectorState(1), payload=(b"old",))
    assert receive(core, _lease(connector_version=2)) == []
    started = receive(core, m.ConnectorState(2), payload=(b"new",))
    assert [type(i) for i in started] == [E.ApplyWeights, E.ApplyConnectorState, E.StartLease]
    assert instructions_in(started, E.ApplyConnectorState)[0].blob == b"new"


def test_a_leaving_runner_returns_leases_hands_over_and_says_goodbye():
    core = _ready()
    receive(core, _lease(1))
    receive(core, _lease(2))
    assert [r.lease_id for r in messages_in(core.leave(0.0), m.LeaseReturned)] == [2]
    assert messages_in(_sampled(core), m.Goodbye) == []
    left = receive(core, m.Accepted(1, ((0, 0),)))
    assert messages_in(left, m.Goodbye)
    assert instructions_in(left, E.Stop)
