"""Runner, learner and driver: what each does with what comes, one step at a time."""

from __future__ import annotations

import pytest
from core_fakes import TIMERS, instructions_in, messages_in, publication, receive, welcome

from rlzmq.core.patience import Retries
from rlzmq.protocol import events as E
from rlzmq.protocol.driver_core import DriverCore
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.wire import messages as m

# ------------------------------------------------------------------ registration


def _runner(**options) -> RunnerCore:
    core = RunnerCore("run", "runner", "uuid", num_envs=4, timers=TIMERS, **options)
    core.start(0.0)
    return core


# ------------------------------------------------------------------ runner


def _lease(lease_id=1, version=0, generation=1, exact=True, **fields) -> m.Lease:
    fields = {"connector_version": -1, "timeout_s": 30.0, **fields}
    return m.Lease(lease_id, 0 if exact else -1, 5, generation, version, exact, **fields)


def _ready_runner() -> RunnerCore:
    core = _runner()
    welcome(core)
    core.take_weights(publication(0), 0.0)
    return core


def _sampled(core, lease_id=1, now=0.0):
    return core.sampled(lease_id, 20, 1, 0, now)


def test_a_lease_waits_for_its_connector_state():
    core = _ready_runner()
    receive(core, m.ConnectorState(1), payload=(b"old",))
    assert receive(core, _lease(connector_version=2)) == []
    started = receive(core, m.ConnectorState(2), payload=(b"new",))
    assert [type(i) for i in started] == [E.ApplyWeights, E.ApplyConnectorState, E.StartLease]
    assert instructions_in(started, E.ApplyConnectorState)[0].blob == b"new"


def test_a_leaving_runner_returns_leases_hands_over_and_says_goodbye():
    core = _ready_runner()
    receive(core, _lease(1))
    receive(core, _lease(2))
    assert [r.lease_id for r in messages_in(core.leave(0.0), m.LeaseReturned)] == [2]
    assert messages_in(_sampled(core), m.Goodbye) == []
    left = receive(core, m.Accepted(1, ((0, 0),)))
    assert messages_in(left, m.Goodbye)
    assert instructions_in(left, E.Stop)


# ------------------------------------------------------------------ driver


def _driver() -> DriverCore:
    core = DriverCore("run", "driver", "uuid", timers=TIMERS)
    core.start(0.0)
    welcome(core)
    return core


def _update(update_id: int) -> m.OpenUpdate:
    return m.OpenUpdate(update_id, 5, 2, update_id)


def test_updates_are_opened_in_order():
    core = _driver()
    assert messages_in(core.open_update(_update(0)), m.OpenUpdate)
    with pytest.raises(ValueError, match="expected 1, got 0"):
        core.open_update(_update(0))


def test_the_tries_of_one_peer_in_a_row_are_counted_and_reported_once() -> None:
    retries = Retries(3)
    assert [retries.try_again("a") for _ in range(5)] == [False, False, True, False, False]
    assert not retries.try_again("b")


def test_a_large_message_begins_the_count_again() -> None:
    retries = Retries(2)
    retries.try_again("a")
    retries.passed("a")
    assert not retries.try_again("a")
