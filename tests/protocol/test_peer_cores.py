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
from rlzmq.wire.fragment_message import FragmentRange, pack_blobs, pack_ranges, unpack_ranges

# ------------------------------------------------------------------ registration


def _runner(**options) -> RunnerCore:
    core = RunnerCore("run", "runner", "uuid", num_envs=4, timers=TIMERS, **options)
    core.start(0.0)
    return core


def test_hello_is_repeated_until_welcome_and_only_its_own_answer_counts():
    core = _runner()
    assert messages_in(core.handle(E.Tick(), 0.5), m.Hello) == []
    (again,) = messages_in(core.handle(E.Tick(), 1.0), m.Hello)
    assert again.hello_id == 2
    welcome(core, hello_id=1)
    assert not core.is_welcome
    welcome(core, hello_id=2)
    assert core.is_welcome
    assert messages_in(core.handle(E.Tick(), 2.0), m.RunnerState)


def test_each_hello_waits_for_the_last():
    core = _runner()
    assert messages_in(core.handle(E.Tick(), 1.0), m.Hello)
    assert messages_in(core.handle(E.Tick(), 1.75), m.Hello) == []
    assert messages_in(core.handle(E.Tick(), 2.0), m.Hello)


def test_a_broker_that_knows_no_such_peer_is_greeted_at_once_but_not_for_every_answer():
    core = _runner()
    refused = m.Refused("unknown_peer", "")
    greeted = [now for now in (0.095, 0.1, 0.15, 0.25) if messages_in(receive(core, refused, now), m.Hello)]
    assert greeted == [0.1, 0.25]


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


def test_a_silent_or_unknowing_or_new_broker_is_greeted_again():
    core = _runner()
    welcome(core)
    assert messages_in(core.handle(E.Tick(), 3.0), m.Hello)
    welcome(core, 3.0)
    assert messages_in(receive(core, m.Refused("unknown_peer", ""), 4.0), m.Hello)
    welcome(core, 4.0)
    assert receive(core, m.BrokerBeat(4), 4.0) == []
    assert messages_in(receive(core, m.BrokerBeat(6), 4.0), m.Hello)


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


def test_a_lease_starts_after_its_weights_were_applied():
    core = _ready_runner()
    kinds = [type(i) for i in receive(core, _lease())]
    assert kinds == [E.ApplyWeights, E.StartLease]
    assert receive(core, _lease(2)) == [], "one at a time"
    sent = _sampled(core)
    assert messages_in(sent, m.Fragment)[0].fragment_id == m.FragmentId("uuid", 1, 0)
    assert instructions_in(sent, E.StartLease)[0].lease_id == 2


def test_a_lease_twice_is_sampled_once():
    core = _ready_runner()
    assert instructions_in(receive(core, _lease()), E.StartLease)
    _sampled(core)
    assert receive(core, _lease()) == []


def test_a_lease_waits_for_its_weights_and_asks_for_them():
    core = _ready_runner()
    assert receive(core, _lease(version=1)) == []
    assert core.handle(E.Tick(), 0.01) == []
    assert messages_in(core.handle(E.Tick(), 0.06), m.SnapshotRequest) == [m.SnapshotRequest(1, 0)]
    started = receive(core, m.Snapshot(1, 1), 0.07, (publication(1),))
    assert [type(i) for i in started] == [E.ApplyWeights, E.StartLease]


def test_a_lease_waits_for_its_connector_state():
    core = _ready_runner()
    receive(core, m.ConnectorState(1), payload=(b"old",))
    assert receive(core, _lease(connector_version=2)) == []
    started = receive(core, m.ConnectorState(2), payload=(b"new",))
    assert [type(i) for i in started] == [E.ApplyWeights, E.ApplyConnectorState, E.StartLease]
    assert instructions_in(started, E.ApplyConnectorState)[0].blob == b"new"


def test_a_lease_that_waits_for_the_one_before_it_is_not_outdated():
    core = _ready_runner()
    assert instructions_in(receive(core, _lease(1, timeout_s=10.0)), E.StartLease)
    assert receive(core, _lease(2, timeout_s=10.0)) == []
    started = instructions_in(_sampled(core, lease_id=1, now=100.0), E.StartLease)
    assert [item.lease_id for item in started] == [2]


@pytest.mark.parametrize(("version", "generation"), [(0, 1), (5, 1)])
def test_a_lease_of_the_past_is_given_back(version, generation):
    core = _ready_runner()
    core.handle(E.ReceivedWeights(publication(1, generation=2)), 0.0)
    returned = messages_in(receive(core, _lease(version=version, generation=generation)), m.LeaseReturned)
    assert [item.reason for item in returned] == ["outdated"]


def test_weights_change_only_between_leases():
    core = _ready_runner()
    receive(core, _lease(exact=False))
    assert core.handle(E.ReceivedWeights(publication(1)), 0.0) == []
    receive(core, _lease(2, exact=False))
    made = _sampled(core)
    assert [type(i) for i in made] == [E.Send, E.ApplyWeights, E.StartLease]
    assert instructions_in(made, E.StartLease)[0].weights_version == 1


def test_a_fragment_is_kept_until_committed_and_sent_again_until_accepted():
    core = _ready_runner()
    for lease_id in (1, 2):
        receive(core, _lease(lease_id))
        _sampled(core, lease_id)
    receive(core, m.Accepted(1, ((0, 0),)))
    assert [f.seq for f in messages_in(core.handle(E.Tick(), 2.0), m.Fragment)] == [1]
    assert core.num_unacked == 2
    receive(core, m.Committed(9, 2, ()))
    assert core.num_unacked == 2, "of another incarnation"
    receive(core, m.Committed(1, 0, ((1, 1),)))
    assert core.num_unacked == 1
    receive(core, m.Committed(1, 2**40, ()))
    assert (core.num_unacked, core.unacked_bytes) == (0, 0)


def test_a_new_broker_gets_everything_that_is_not_committed():
    core = _ready_runner()
    receive(core, _lease(1))
    _sampled(core)
    receive(core, m.Accepted(1, ((0, 0),)))
    receive(core, _lease(2))
    receive(core, _lease(3))
    receive(core, m.BrokerBeat(6))
    sent = welcome(core, broker=6)
    assert [f.seq for f in messages_in(sent, m.Fragment)] == [0]
    assert core.current_lease is not None, "the lease at work goes on"
    assert instructions_in(_sampled(core, 2), E.StartLease) == [], "the leases behind it are void"


def test_a_leaving_runner_returns_leases_hands_over_and_says_goodbye():
    core = _ready_runner()
    receive(core, _lease(1))
    receive(core, _lease(2))
    assert [r.lease_id for r in messages_in(core.handle(E.Leave(), 0.0), m.LeaseReturned)] == [2]
    assert messages_in(_sampled(core), m.Goodbye) == []
    left = receive(core, m.Accepted(1, ((0, 0),)))
    assert messages_in(left, m.Goodbye)
    assert instructions_in(left, E.Stop)


def test_a_failed_lease_is_given_back():
    core = _ready_runner()
    receive(core, _lease(1))
    receive(core, _lease(2))
    made = core.handle(E.LeaseFailed(1, "env raised"), 0.0)
    assert messages_in(made, m.LeaseReturned) == [m.LeaseReturned(1, "env raised")]
    assert instructions_in(made, E.StartLease)[0].lease_id == 2
    with pytest.raises(ValueError, match="not started"):
        _sampled(core, 77)


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


def test_nothing_is_said_before_the_group_stands():
    core = LearnerCore("run", "learner-0", "uuid")
    assert core.handle(E.Tick(), 9.0) == []


def test_an_update_is_run_when_complete_decoded_and_told_to():
    core = _learner()
    assert [i.index for i in instructions_in(_plan(core, num_fragments=2), E.DecodeShard)] == [0, 1]
    assert core.handle(E.ShardDecoded(0, 100, 0), 0.0) == []
    assert _train(core) == [], "not before READY"
    assert messages_in(core.handle(E.ShardDecoded(0, 100, 1), 0.0), m.ShardReady) == [
        m.ShardReady(0, 100, 1, 0)
    ]
    assert _train(core) == [E.RunUpdate(0, 100, 2, 10, 10)]
    assert _train(core) == [], "once"


def test_updates_run_in_order():
    core = _learner()
    for update_id in (1, 0):
        _plan(core, update_id, 100 + update_id)
        _decoded(core, update_id, 100 + update_id)
    assert _train(core, 1, 101) == []
    assert instructions_in(_train(core, 0, 100), E.RunUpdate)[0].update_id == 0
    made = core.handle(E.UpdateTrained(0, 100, True, 10, b"r"), 0.0)
    assert messages_in(made, m.UpdateDone)
    assert instructions_in(made, E.RunUpdate)[0].update_id == 1


def test_a_higher_attempt_voids_a_lower_one_but_not_one_at_work():
    core = _learner()
    _plan(core, attempt=100)
    assert instructions_in(_plan(core, attempt=101), E.DropShards) == [E.DropShards(0, 100)]
    assert _plan(core, attempt=100) == []
    _decoded(core, attempt=101)
    _train(core, attempt=101)
    assert _plan(core, attempt=102) == []


def test_done_is_repeated_until_the_driver_has_the_report():
    core = _learner()
    _plan(core)
    _decoded(core)
    _train(core)
    core.handle(E.UpdateTrained(0, 100, True, 10, b"r"), 0.0)
    assert messages_in(core.handle(E.Tick(), 2.0), m.UpdateDone)
    forgotten = FragmentRange(m.FragmentId("r", 1, 1), 0, 0)
    receive(core, m.UpdateCommitted(0, 1), 2.0, tuple(pack_ranges([forgotten])))
    assert messages_in(core.handle(E.Tick(), 4.5), m.UpdateDone) == []
    _, payload = core._hello()
    assert unpack_ranges(payload[:2]) == [FragmentRange(m.FragmentId("r", 1, 1), 0, 5)]


def test_what_an_earlier_broker_sent_changes_nothing_after_hello():
    core = _learner()
    _plan(core)
    _decoded(core)
    (hello,) = messages_in(receive(core, m.BrokerBeat(6)), m.Hello)
    assert hello.training_updates == ()
    assert _train(core) == []
    made = welcome(core, broker=6)
    assert messages_in(made, m.ShardReady), "the new broker may still adopt the plan"
    assert _train(core) == []
    assert instructions_in(_train(core, broker=6), E.RunUpdate)


def test_a_shard_that_cannot_be_used_is_refused_with_its_reason():
    core = _learner()
    _plan(core)
    (refused,) = messages_in(
        core.handle(E.ShardFailed(0, 100, 0, "not_finite", "NaN in obs"), 0.0), m.ShardRefused
    )
    assert (refused.fragment.seq, refused.reason) == (0, "not_finite")


def test_a_new_generation_voids_what_was_not_trained_and_hands_memory_on():
    core = _learner()
    _plan(core)
    _decoded(core)
    _train(core)
    core.handle(E.UpdateTrained(0, 100, True, 10, b"r"), 0.0)
    _plan(core, 1, 101)
    made = core.handle(E.GroupFormed(2, 0, 1, 1, core.export_memory()), 1.0)
    assert instructions_in(made, E.DropShards) == [E.DropShards(1, 101)]
    (hello,) = messages_in(made, m.Hello)
    assert (hello.generation, hello.num_ranks, hello.next_update) == (2, 1, 1)
    replacement = LearnerCore("run", "learner-1", "other", timers=TIMERS)
    replacement.handle(E.GroupFormed(2, 1, 2, 1, core.export_memory()), 1.0)
    (done,) = messages_in(welcome(replacement), m.UpdateDone)
    assert (done.update_id, done.generation, done.rank) == (0, 2, 1)
    with pytest.raises(ValueError, match="not above"):
        core.handle(E.GroupFormed(2, 0, 1, 1), 1.0)


def test_a_lineage_is_handed_on_with_the_memory():
    core = _learner()
    (hello,) = messages_in(core.handle(E.GroupFormed(2, 0, 1, 0, begins_lineage=True), 0.0), m.Hello)
    assert hello.lineage == 2
    (hello,) = messages_in(core.handle(E.GroupFormed(3, 0, 2, 0, core.export_memory()), 0.0), m.Hello)
    assert hello.lineage == 2
    replacement = LearnerCore("run", "learner-1", "other", timers=TIMERS)
    (hello,) = messages_in(replacement.handle(E.GroupFormed(3, 1, 2, 0, core.export_memory()), 0.0), m.Hello)
    assert hello.lineage == 2


def test_a_refusal_of_an_older_generation_is_ignored():
    core = _learner()
    core.handle(E.GroupFormed(3, 0, 1, 0), 0.0)
    assert receive(core, m.Refused("fenced", "", 1)) == []
    assert instructions_in(receive(core, m.Refused("fenced", "", 3)), E.Stop)


def test_rank_0_sends_weights_now_to_a_new_broker_and_when_asked():
    core = _learner()
    news = E.NewWeights(1, 0, b"frame")
    assert messages_in(core.handle(news, 0.0), m.Weights) == [m.Weights(1, 0)]
    assert messages_in(receive(core, m.SnapshotRequest(-1, -1)), m.Weights) == [m.Weights(1, 0)]
    assert receive(core, m.SnapshotRequest(1, 0)) == []
    receive(core, m.BrokerBeat(6))
    assert messages_in(welcome(core, broker=6), m.Weights) == [m.Weights(1, 0)]


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


def test_reports_come_once_and_in_order():
    core = _driver()
    for update_id in range(2):
        core.open_update(_update(update_id))
    assert instructions_in(_report(core, 1), E.Report) == []
    reports = instructions_in(_report(core, 0), E.Report)
    assert [r.report.update_id for r in reports] == [0, 1]
    assert [(f.seq, steps, bytes(meta)) for f, steps, meta in reports[0].fragments] == [(0, 10, b"meta")]
    assert [bytes(result) for result in reports[0].results] == [b"r0", b"r1"]
    assert reports[0].watermarks == {("r", 1): 1}
    again = _report(core, 0)
    assert instructions_in(again, E.Report) == []
    assert messages_in(again, m.DriverState) == [m.DriverState(-1, 2)]


def test_a_report_that_came_early_is_left_to_a_new_broker_to_make_again():
    core = _driver()
    for update_id in range(2):
        core.open_update(_update(update_id))
    _report(core, 1)
    receive(core, m.BrokerBeat(6))
    assert [update.update_id for update in messages_in(welcome(core, broker=6), m.OpenUpdate)] == [0, 1]
    (report,) = instructions_in(_report(core, 0, broker=6), E.Report)
    assert report.report.update_id == 0
    assert instructions_in(_report(core, 1, broker=6), E.Report)


def test_reports_of_another_broker_or_lineage_are_ignored():
    core = _driver()
    core.open_update(_update(0))
    assert _report(core, 0, broker=4) == []
    assert _report(core, 0, min_generation=3) == []
    core.reset(3, 0)
    core.open_update(_update(0))
    assert _report(core, 0) == []
    assert instructions_in(_report(core, 0, min_generation=3), E.Report)


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


def test_watermarks_of_runners_that_are_gone_are_forgotten():
    core = _driver()
    core.open_update(_update(0))
    _report(core, 0)
    core.open_update(_update(1))
    gone = [FragmentRange(m.FragmentId("r", 1, 0), 0, 1), FragmentRange(m.FragmentId("s", 1, 5), 0, 0)]
    message = m.UpdateReport(5, -1, 1, 1, 10, 10, 10, {}, {}, (0,), (10,))
    payload = (*pack_ranges([]), *pack_blobs([]), *pack_blobs([]), *pack_ranges(gone))
    (report,) = instructions_in(receive(core, message, payload=payload), E.Report)
    assert (list(report.forgotten), report.watermarks) == ([("r", 1)], {("s", 1): 5})
    hello = next(i for i in core.start(9.0) if isinstance(i, E.Send))
    assert [item.fragment.runner for item in unpack_ranges(hello.payload)] == ["s"]


def test_a_rank_whose_group_is_being_formed_anew_does_not_mind_that_its_last_one_is_over():
    core = _learner()
    core.is_forming = True
    assert receive(core, m.Refused("fenced", "", 1)) == []
    core.handle(E.GroupFormed(2, 0, 2, 0), 0.0)
    assert not core.is_forming
    assert instructions_in(receive(core, m.Refused("fenced", "", 2)), E.Stop)


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


def test_hello_carries_what_was_accounted_for():
    core = _driver()
    core.open_update(_update(0))
    _report(core, 0, trained=30)
    (hello,) = messages_in(core.handle(E.Tick(), 9.0), m.Hello)
    assert (hello.next_update, hello.trained) == (1, 30)
    assert dataclasses.replace(hello, hello_id=1).role == "driver"
