"""Runner, learner and driver: what each does with what comes, one step at a time."""

from __future__ import annotations

import dataclasses

import pytest
from core_fakes import TIMERS, instructions_in, messages_in, publication, receive, welcome

from rlzmq.protocol import events as E
from rlzmq.protocol.driver_core import DriverCore
from rlzmq.protocol.learner_core import LearnerCore
from rlzmq.protocol.peer_core import PeerTimers
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.wire import messages as m
from rlzmq.wire.fragment_message import FragmentRange, pack_blobs, pack_ranges

# ------------------------------------------------------------------ registration


def _runner(**options) -> RunnerCore:
    core = RunnerCore("run", "runner", "uuid", num_envs=4, timers=TIMERS, **options)
    core.start(0.0)
    return core


def test_it_knows_since_when_the_broker_is_silent():
    core = RunnerCore("run", "runner", "uuid", num_envs=4)
    assert core.timers == PeerTimers()
    assert core.heard_at == float("-inf")
    core.start(1.0)
    assert core.heard_at == 1.0
    welcome(core, 2.0)
    assert core.heard_at == 2.0
    assert messages_in(core.handle(E.Tick(), 5.0), m.Hello)
    assert core.heard_at == 2.0, "it has said nothing since"
    timers = PeerTimers(hello_retry_s=9.0)
    assert RunnerCore("run", "runner", "uuid", num_envs=4, timers=timers).timers is timers


def test_a_refusal_or_a_goodbye_stops_the_core():
    core = _runner()
    assert instructions_in(receive(core, m.Refused("spaces_digest", "a, b")), E.Stop) == [
        E.Stop("spaces_digest", "a, b")
    ]
    assert core.handle(E.Tick(), 9.0) == []
    core = _runner()
    assert instructions_in(receive(core, m.Goodbye("done")), E.Stop)[0].reason == "goodbye"


# ------------------------------------------------------------------ runner


def _lease(lease_id=1, version=0, generation=1, exact=True, **fields) -> m.Lease:
    fields = {"connector_version": -1, "timeout_s": 30.0, **fields}
    return m.Lease(lease_id, 0 if exact else -1, 5, generation, version, exact, **fields)


def _ready_runner() -> RunnerCore:
    core = _runner()
    welcome(core)
    core.handle(E.ReceivedWeights(publication(0)), 0.0)
    return core


def _sampled(core, lease_id=1, now=0.0):
    return core.handle(E.FragmentSampled(lease_id, 20, 1, 0), now)


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
    assert [r.lease_id for r in messages_in(core.handle(E.Leave(), 0.0), m.LeaseReturned)] == [2]
    assert messages_in(_sampled(core), m.Goodbye) == []
    left = receive(core, m.Accepted(1, ((0, 0),)))
    assert messages_in(left, m.Goodbye)
    assert instructions_in(left, E.Stop)


# ------------------------------------------------------------------ learner


_RANGES = [FragmentRange(m.FragmentId("r", 1, 0), 0, 5), FragmentRange(m.FragmentId("r", 1, 1), 0, 5)]


def _learner(next_update=0) -> LearnerCore:
    core = LearnerCore("run", "learner-0", "uuid", timers=TIMERS)
    core.handle(E.GroupFormed(1, 0, 2, next_update), 0.0)
    welcome(core)
    return core


def _plan(core, update_id=0, attempt=100, num_fragments=1, broker=5):
    made = receive(core, m.ShardPlan(broker, update_id, attempt, 1, num_fragments, 5 * num_fragments, 10))
    for index in range(num_fragments):
        made += receive(
            core,
            m.Shard(broker, update_id, attempt, 1, index, m.FragmentId("r", 1, index), 0, 5),
            payload=(b"head", b"obs"),
        )
    return made


def _decoded(core, update_id=0, attempt=100, num_fragments=1):
    made = []
    for index in range(num_fragments):
        made += core.handle(E.ShardDecoded(update_id, attempt, index), 0.0)
    return made


def _train(core, update_id=0, attempt=100, broker=5):
    return receive(core, m.Train(broker, update_id, attempt, 1, 10), payload=tuple(pack_ranges(_RANGES)))


# ------------------------------------------------------------------ driver


def _driver() -> DriverCore:
    core = DriverCore("run", "driver", "uuid", timers=TIMERS)
    core.start(0.0)
    welcome(core)
    return core


def _update(update_id: int) -> m.OpenUpdate:
    return m.OpenUpdate(update_id, 5, 2, update_id)


def _report(core, update_id, broker=5, min_generation=-1, trained=10):
    counts = {"sampled": trained, "trained": trained, "pending": 0}
    message = m.UpdateReport(broker, min_generation, update_id, 1, 10, 10, 10, counts, {}, (0,), (10,))
    fragments = [FragmentRange(m.FragmentId("r", 1, update_id), 0, 10)]
    watermarks = [FragmentRange(m.FragmentId("r", 1, update_id + 1), 0, 0)]
    payload = (
        *pack_ranges(fragments),
        *pack_blobs([b"meta"]),
        *pack_blobs([b"r0", b"r1"]),
        *pack_ranges(watermarks),
    )
    return receive(core, message, payload=payload)


def test_updates_are_opened_in_order():
    core = _driver()
    assert messages_in(core.open_update(_update(0)), m.OpenUpdate)
    with pytest.raises(ValueError, match="expected 1, got 0"):
        core.open_update(_update(0))


def test_a_new_broker_learns_what_is_open():
    core = _driver()
    core.open_update(_update(0))
    core.set_connector_state(4, b"state")
    core.pause()
    receive(core, m.BrokerBeat(6))
    sent = [type(i.message) for i in welcome(core, broker=6) if isinstance(i, E.Send)]
    assert sent == [m.Pause, m.ConnectorState, m.OpenUpdate]
    assert messages_in(core.resume(), m.Resume)


def test_a_broker_that_is_paused_against_the_drivers_will_hears_so_again():
    core = _driver()
    for is_paused, wish in ((True, m.Resume), (False, m.Pause)):
        core._is_paused = not is_paused
        progress = m.Progress(0, -1, -1, is_paused=is_paused)
        assert messages_in(receive(core, progress), wish)
        assert not messages_in(receive(core, dataclasses.replace(progress, is_paused=not is_paused)), wish)


def test_what_the_broker_lacks_is_sent_again():
    core = _driver()
    core.open_update(_update(0))
    core.open_update(_update(1))
    core.set_connector_state(4, b"state")
    progress = m.Progress(1, 3, -1)
    made = receive(core, progress)
    assert [type(i.message) for i in instructions_in(made, E.Send)] == [m.ConnectorState, m.OpenUpdate]
    assert instructions_in(made, E.Tell) == [E.Tell(progress)]
    core.reset(2, 1)
    assert messages_in(receive(core, progress), m.Reset) == [m.Reset(2, 1)]
