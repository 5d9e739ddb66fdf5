"""The broker's decisions, one at a time."""

from __future__ import annotations

import pytest
from core_fakes import Bench, publication

from rlzmq.protocol.driver_core import parse_report
from rlzmq.protocol.events import Malformed, PeerLost, Publish, Quarantine, Received, Send, Stop, Tick
from rlzmq.protocol.messages import (
    Accepted,
    BrokerBeat,
    Committed,
    Config,
    ConfigRequest,
    ConnectorState,
    DriverState,
    Goodbye,
    LearnerState,
    LeaseReturned,
    Notice,
    Pause,
    Refused,
    Rejected,
    Reset,
    Resume,
    RunnerState,
    Shard,
    ShardPlan,
    ShardReady,
    ShardRefused,
    Snapshot,
    SnapshotRequest,
    Status,
    StatusRequest,
    Train,
    UpdateCommitted,
    UpdateReport,
    Weights,
    Welcome,
)
from rlzmq.protocol.ranges import FragmentRange, pack_ranges
from rlzmq.protocol.schema import FragmentId
from rlzmq.protocol.values import unpack_blob
from rlzmq.protocol.weights import open_publication

# ------------------------------------------------------------------ the door


def test_every_role_is_welcomed_with_an_incarnation():
    bench = Bench()
    bench.runner(incarnation=0)
    (welcome,) = bench.sent("runner", Welcome)
    assert (welcome.incarnation, welcome.broker_incarnation, welcome.hello_id) == (1, 5, 1)


def test_a_repeated_hello_is_answered_and_changes_nothing():
    bench = Bench()
    bench.runner()
    bench.hellos["runner"] = 0
    bench.runner()
    assert len(bench.sent("runner", Welcome)) == 1
    assert len(bench.state.runners) == 1


def test_a_new_process_of_a_name_fences_the_old_one():
    bench = Bench()
    bench.ready_run()
    bench.runner(name="runner")
    bench.hello("other", "runner", name="runner", num_envs=4)
    assert bench.sent("other", Welcome)[0].incarnation == 2
    assert bench.sent("runner", Refused)[0].reason == "fenced"
    bench.fragment(steps=7)
    assert bench.sent("runner", Rejected)[0].reason == "fenced"
    bench.fragment(steps=7, seq=0)
    assert bench.state.ledger.accounting.dropped == {"fenced": 7}
    bench.runner()
    assert bench.sent("runner", Refused)[0].reason == "fenced"


def test_a_lower_incarnation_is_refused():
    bench = Bench()
    bench.runner(incarnation=3)
    bench.hello("other", "runner", name="runner", num_envs=4, incarnation=3)
    assert bench.sent("other", Refused)[0].reason == "fenced"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run_id": "another"}, "run_id"),
        ({"config_digest": "theirs"}, "config_digest"),
        ({"spaces_digest": "theirs"}, "spaces_digest"),
        ({"package_version": "0.0.1"}, "package_version"),
        ({"num_envs": 0}, "num_envs"),
        ({"uuid": "a\nb"}, "identity"),
    ],
)
def test_peers_that_do_not_match_the_run_are_refused_with_both_values(fields, reason):
    bench = Bench()
    bench.driver(config_digest="ours", spaces_digest="ours", package_version="0.1.0")
    bench.runner(**fields)
    (refused,) = bench.sent("runner", Refused)
    assert refused.reason == reason
    assert bench.sent("driver", Notice)[0].event == "refused"
    assert not bench.state.runners


def test_roles_say_only_what_is_theirs():
    bench = Bench()
    bench.runner()
    bench.send("runner", Weights(1, 5), (publication(5),))
    assert bench.sent("runner", Rejected)[0].reason == "role"
    assert bench.state.weights is None
    assert bench.state.refused == {"role": 1}
    bench.hello("alien", "pirate")
    assert bench.sent("alien", Refused)[0].reason == "role"


def test_strangers_are_asked_to_say_hello():
    bench = Bench()
    bench.send("nobody", StatusRequest())
    assert bench.sent("nobody", Refused)[0].reason == "unknown_peer"
    bench.send("nobody", Goodbye("x"))
    assert bench.out == []


def test_malformed_messages_are_counted_and_answered_to_those_we_know():
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.event(Malformed(b"runner", "dtype", "array 0: dtype 'O'"))
    assert bench.sent("runner", Rejected)[0].detail == "array 0: dtype 'O'"
    assert bench.sent("driver", Notice)[0].event == "protocol_error"
    bench.event(Malformed(b"nobody", "malformed", "x"))
    assert bench.out == []
    bench.event(Malformed(b"old-release", "version", "version 3, here 1"))
    assert bench.sent("old-release", Refused)[0].detail == "version 3, here 1"
    assert bench.state.refused == {"dtype": 1, "malformed": 1, "version": 1}


def test_silent_peers_are_lost_and_their_leases_granted_anew():
    bench = Bench(peer_timeout_s=4.0)
    bench.ready_run(batch=4)
    bench.runner("a")
    assert len(bench.leases("a")) == 1
    bench.now = 3.0
    bench.hello("driver", "driver")
    bench.learner()
    bench.runner("b")
    assert bench.leases("b") == []
    bench.now = 4.5
    bench.event(Tick())
    assert len(bench.leases("b")) == 1
    assert [n.event for n in bench.sent("driver", Notice)] == ["lost"]


def test_notices_wait_for_the_driver():
    bench = Bench()
    bench.runner()
    bench.driver()
    assert [notice.event for notice in bench.sent("driver", Notice)] == ["joined", "joined"]


def test_the_broker_stops_without_a_driver():
    bench = Bench(driver_timeout_s=3.0)
    bench.event(Tick())
    assert not any(isinstance(item, Stop) for item in bench.out)
    bench.driver()
    bench.event(PeerLost(b"driver"))
    bench.now = 3.0
    bench.event(Tick())
    assert any(isinstance(item, Stop) for item in bench.out)


def test_the_configuration_is_given_to_whoever_asks_before_hello():
    bench = Bench()
    bench.send("new", ConfigRequest())
    assert [item.message.reason for item in bench.out] == ["no_driver"]
    bench.driver()
    bench.send("driver", Config("run", "digest"), (b"the config",))
    bench.send("new", ConfigRequest())
    assert bench.out == [Send(b"new", Config("run", "digest", driver=1), (b"the config",))]


# ------------------------------------------------------------------ leases


def test_no_lease_before_weights_driver_and_connector_state_are_there():
    bench = Bench()
    bench.runner()
    bench.learner()
    bench.weights(0)
    assert bench.leases() == []
    bench.driver()
    bench.open(connector_version=2)
    assert bench.leases() == []
    bench.send("driver", ConnectorState(1), (b"old",))
    assert bench.leases() == []
    bench.send("driver", ConnectorState(2), (b"merged",))
    kinds = [type(item.message) for item in bench.out if item.peer == b"runner"]
    assert kinds[0] is ConnectorState, "the state goes out before the lease that asks for it"
    assert bench.leases()[0].connector_version == 2


def test_leases_of_an_on_policy_update_name_exactly_its_version():
    bench = Bench()
    bench.ready_run(batch=40)
    bench.runner()
    assert [(lease.num_vector_steps, lease.exact, lease.weights_version) for lease in bench.leases()] == [
        (5, True, 0),
        (5, True, 0),
    ]
    bench.fragment(bench.leases()[0].lease_id, steps=20)
    assert bench.leases() == []
    bench.fragment(steps=18, lease_id=0)
    assert bench.state.leases.leased_env_steps() == 20


def test_what_autoreset_took_is_granted_again_exactly():
    bench = Bench()
    bench.ready_run(batch=40)
    bench.runner()
    first, second = bench.leases()
    bench.fragment(first.lease_id, steps=15)
    assert bench.leases() == [], "near the end nothing is granted ahead"
    bench.fragment(second.lease_id, steps=20)
    (rest,) = bench.leases()
    assert rest.num_vector_steps == 2
    assert rest.accepted == ((1, 1),), "the lease carries the acknowledgement"


def test_a_runner_on_its_own_is_never_cut_short():
    bench = Bench()
    bench.ready_run(batch=400)
    bench.runner()
    for _ in range(5):
        (lease, *_) = bench.leases()
        bench.now += 1.0
        bench.fragment(lease.lease_id, steps=lease.num_vector_steps * 4)
        assert {lease.max_s for lease in bench.leases()} <= {0.0}


def test_a_slow_runner_gets_less_of_the_rest_and_is_cut_after_twice_its_time():
    bench = Bench()
    bench.ready_run(batch=1200)
    seconds_per_step = {"fast": 0.005, "slow": 0.045}
    for name in seconds_per_step:
        bench.runner(name)
    ends_at: dict[str, float] = {}
    num_steps = dict.fromkeys(seconds_per_step, 0)
    limits: list[float] = []
    while True:
        for name, pace in seconds_per_step.items():
            leases = bench.state.leases.of_peer(f"uuid-{name}")
            if leases and name not in ends_at:
                ends_at[name] = bench.now + leases[0].num_env_steps * pace
        if not ends_at:
            break
        name = min(ends_at, key=ends_at.__getitem__)
        bench.now = ends_at.pop(name)
        lease = bench.state.leases.of_peer(f"uuid-{name}")[0]
        num_steps[name] += lease.num_env_steps
        bench.fragment(lease.lease_id, steps=lease.num_env_steps, runner=name)
        limits += [item.max_s / (item.num_vector_steps * 4) for item in bench.leases("slow") if item.max_s]
    assert sum(num_steps.values()) == 1200
    assert 80 <= num_steps["slow"] <= 160, "a tenth of it"
    assert bench.now <= 6.3, "both end at about the same time; 5.4 s would be perfect"
    assert limits == pytest.approx([2 * 0.045] * len(limits))
    assert limits


def test_what_a_slow_runner_left_of_its_lease_is_granted_to_others():
    bench = Bench()
    bench.ready_run(batch=80)
    bench.runner("a")
    bench.runner("b")
    bench.now = 1.0
    for lease in bench.state.leases.of_peer("uuid-b"):
        bench.fragment(lease.lease_id, steps=20, runner="b")
    assert bench.leases("b") == [], "a holds all that is left"
    bench.fragment(bench.state.leases.of_peer("uuid-a")[0].lease_id, steps=4, runner="a")
    (rest,) = bench.leases("b")
    assert rest.num_vector_steps * 4 == 20 - 4


def test_a_peer_that_keeps_sending_what_no_peer_sends_is_expelled_and_its_place_is_free():
    bench = Bench()
    bench.ready_run(batch=400)
    bench.runner()
    for _ in range(9):
        bench.event(Malformed(b"runner", "dtype", "array 0: dtype 'O'"))
        assert bench.sent("runner", Refused) == []
    bench.runner()  # saying HELLO again wipes nothing out
    bench.event(Malformed(b"runner", "dtype", "array 0: dtype 'O'"))
    assert bench.sent("runner", Refused)[0].reason == "expelled"
    assert bench.sent("driver", Notice)[-1].event == "expelled"
    assert bench.state.leases.leased_env_steps() == 0, "its leases are free"
    assert bench.fragment(steps=20) is not None
    assert bench.sent("runner", Rejected)[0].reason == "fenced"
    bench.runner()
    assert bench.sent("runner", Refused)[0].reason == "fenced"
    bench.runner(uuid="another", incarnation=0)
    assert bench.sent("runner", Welcome)


def test_the_driver_is_never_expelled():
    bench = Bench()
    bench.ready_run()
    for _ in range(30):
        bench.event(Malformed(b"driver", "dtype", "x"))
    assert bench.state.driver is not None


def test_runners_take_turns():
    bench = Bench()
    bench.ready_run(batch=60)
    bench.runner("a")
    assert len(bench.leases("a")) == 2
    bench.runner("b")
    (lease,) = bench.leases("b")
    bench.fragment(lease.lease_id, steps=lease.num_vector_steps * 4, runner="b")
    assert bench.leases("a") == [], "a holds two already"
    assert [lease.accepted for lease in bench.leases("b")] + [
        accepted.accepted for accepted in bench.sent("b", Accepted)
    ] == [((0, 0),)]


def test_expired_leases_go_to_someone_else_and_the_late_fragment_still_counts():
    bench = Bench(peer_timeout_s=100.0)
    bench.ready_run(batch=20, lease_timeout_s=3.0)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.runner("b")
    bench.now = 3.0
    bench.event(Tick())
    assert len(bench.leases("b")) == 1
    assert bench.leases("a") == [], "a is suspect"
    assert [notice.event for notice in bench.sent("driver", Notice)] == ["lease_expired"]
    bench.fragment(lease.lease_id, steps=20, runner="a")
    assert bench.sent("learner-0", ShardPlan)[0].num_env_steps == 20


def test_a_lease_that_never_arrived_is_granted_anew():
    bench = Bench(resend_s=2.0)
    bench.ready_run(batch=4)
    bench.runner()
    bench.now = 2.0
    state = RunnerState(0, 0, (), (), False, 1, 0, -1, 0, 0)
    bench.send("runner", state)
    assert len(bench.leases()) == 1


def test_a_runner_without_progress_hangs():
    bench = Bench(hung_after_s=2.0, peer_timeout_s=100.0)
    bench.ready_run(batch=20)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.runner("b")
    for now in (1.0, 2.0, 3.1):
        bench.now = now
        bench.send("a", RunnerState(0, 0, (), (lease.lease_id,), True, 1, 0, -1, 7, 0))
        if now == 2.0:
            bench.event(Tick())
            assert bench.leases("b") == []
    bench.event(Tick())
    assert "hung" in [notice.event for notice in bench.sent("driver", Notice)]
    assert len(bench.leases("b")) == 1


def test_a_runner_at_work_that_falls_silent_is_told_once():
    bench = Bench(late_after_s=2.0)
    bench.ready_run(batch=20)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.runner("before its first samples")
    bench.now = 0.5
    bench.fragment(lease.lease_id, steps=4, runner="a")
    told = []
    for now in (2.4, 2.6, 2.7):
        bench.now = now
        bench.event(Tick())
        told.append([notice.event for notice in bench.sent("driver", Notice)])
    assert told == [[], ["silent"], []]


def test_the_rank_that_the_other_waits_for_is_told():
    bench = Bench(late_after_s=2.0)
    bench.driver()
    for rank in (0, 1):
        bench.learner(rank, num_ranks=2)
    told = []
    for tenths in range(5, 40, 5):
        bench.now = tenths / 10
        for rank in (0, 1):
            progress = min(tenths, 10 if rank else 11)
            bench.send(f"learner-{rank}", LearnerState(1, int(tenths > 5), (0,), (0,), (1,), (2,), progress))
        bench.event(Tick())
        told += [(bench.now, notice.event, notice.name) for notice in bench.sent("driver", Notice)]
    assert told == [(3.5, "hung", "learner-1")]


def test_the_only_rank_hangs_by_its_own_pace():
    bench = Bench(first_hung_after_s=100.0, peer_timeout_s=1000.0)
    bench.driver()
    bench.learner()
    told = []
    for now in range(1, 60):
        bench.now = float(now)
        bench.send("learner-0", LearnerState(1, 1, (1,), (0,), (1,), (2,), min(now, 10)))
        bench.event(Tick())
        told += [(bench.now, notice.event, notice.name) for notice in bench.sent("driver", Notice)]
    assert told == [(40.0, "hung", "learner-0")], "thirty seconds after its last minibatch"


def test_more_than_a_share_of_the_memory_is_not_taken_without_a_lease():
    bench = Bench(window_bytes=1000, memory_bytes=1000, resent_bytes=500)
    bench.driver()
    bench.runner()
    taken = 0
    while not bench.sent("runner", Rejected):
        bench.fragment(steps=1)
        taken += 1
        assert taken < 100
    assert bench.sent("runner", Rejected)[0].reason == "overrun"
    assert bench.state.ledger.num_bytes <= 1000
    assert bench.state.ledger.accounting.dropped == {"rejected": 1}


def test_a_returned_lease_is_granted_to_the_next():
    bench = Bench()
    bench.ready_run(batch=4)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.send("b", LeaseReturned(lease.lease_id, "not its own"))
    bench.runner("b")
    assert bench.leases("b") == []
    bench.send("a", LeaseReturned(lease.lease_id, "leaving"))
    assert len(bench.leases("b")) == 1


def test_pause_and_resume():
    bench = Bench()
    bench.ready_run()
    bench.send("driver", Pause())
    bench.runner()
    assert bench.leases() == []
    bench.send("driver", Resume())
    assert len(bench.leases()) == 2


def test_staleness_lets_runners_run_ahead_by_its_slots_only():
    bench = Bench(max_leases_per_runner=100)
    bench.ready_run(batch=40, staleness=2, max_policy_lag=2)
    bench.runner()
    assert sum(lease.num_vector_steps for lease in bench.leases()) * 4 == 120
    assert not any(lease.exact for lease in bench.leases())


def test_a_slot_is_held_until_the_new_weights_are_out():
    bench = Bench(max_leases_per_runner=100)
    bench.ready_run(batch=20, staleness=1, max_policy_lag=1)
    bench.runner()
    leases = bench.leases()
    assert len(leases) == 2
    bench.fragment(leases[0].lease_id, steps=20)
    assert bench.leases() == []
    plan = bench.make_ready()
    bench.done(plan)
    assert bench.sent("driver", UpdateReport)
    assert bench.leases() == [], "trained, but version 1 is not published"
    bench.weights(1)
    assert [lease.weights_version for lease in bench.leases()] == [1]


def test_the_window_stops_running_ahead_but_never_starves_the_batch():
    bench = Bench(max_leases_per_runner=100, window_bytes=1)
    bench.ready_run(batch=40, staleness=3, max_policy_lag=3)
    bench.runner()
    leases = bench.leases()
    for lease in leases[:1]:
        bench.fragment(lease.lease_id, steps=20)
    assert sum(lease.num_vector_steps * 4 for lease in leases) >= 40
    held = bench.state.leases.leased_env_steps()
    assert held >= 20
    bench.fragment(leases[1].lease_id, steps=20)
    assert bench.leases() == []


# ------------------------------------------------------------------ fragments and updates


def test_ranks_get_exactly_their_steps_and_the_frames_untouched():
    bench = Bench()
    bench.ready_run(num_ranks=2, batch=30)
    bench.runner()
    bench.fragment(bench.leases()[0].lease_id, steps=20)
    bench.fragment(bench.leases()[0].lease_id, steps=12, batch={"columns": ["obs"]})
    shards = {
        rank: [
            (item.message, item.payload)
            for item in bench.out
            if isinstance(item.message, Shard) and item.peer == b"learner-%d" % rank
        ]
        for rank in (0, 1)
    }
    summary = {
        rank: [(s.fragment.seq, s.first, s.num_steps) for s, _ in items] for rank, items in shards.items()
    }
    assert summary == {0: [(0, 0, 15)], 1: [(0, 15, 5), (1, 0, 10)]}
    entries = bench.state.ledger.entries
    for items in shards.values():
        for shard, payload in items:
            assert payload is entries[shard.fragment].frames
    assert [plan.num_env_steps for rank in (0, 1) for plan in bench.sent(f"learner-{rank}", ShardPlan)] == [
        15,
        15,
    ]


def test_train_is_sent_when_every_rank_is_ready_and_commit_when_every_rank_is_done():
    bench = Bench()
    bench.ready_run(num_ranks=2, batch=30)
    bench.runner()
    bench.fragment(steps=20)
    bench.fragment(steps=12)
    out = bench.out
    plan = bench.make_ready(0)
    assert bench.sent("learner-0", Train) == []
    bench.out = out
    bench.make_ready(1)
    assert len(bench.sent("learner-0", Train)) == len(bench.sent("learner-1", Train)) == 1
    bench.done(plan, 0, 2)
    assert bench.sent("driver", UpdateReport) == []
    bench.done(plan, 1, 2)
    (sent,) = [item for item in bench.out if isinstance(item.message, UpdateReport)]
    report = parse_report(sent.message, sent.payload)
    assert report.report.accounting == {"sampled": 32, "trained": 30, "pending": 0}
    assert report.report.dropped == {"surplus": 2}
    assert [(f.seq, steps, unpack_blob(meta)) for f, steps, meta in report.fragments] == [
        (0, 20, {"seq": 0}),
        (1, 12, {"seq": 1}),
    ]
    assert [bytes(result) for result in report.results] == [b"results", b"results"]
    assert report.watermarks == {("uuid-runner", 1): 2}
    assert bench.sent("runner", Committed) == [], "until the driver has the report"
    bench.send("driver", DriverState(-1, 1))
    assert bench.sent("runner", Committed)[0].watermark == 2


def test_the_surplus_is_carried_to_the_next_update_when_staleness_allows():
    bench = Bench()
    bench.ready_run(batch=15, staleness=1, max_policy_lag=1)
    bench.open(1, batch=15, staleness=1, max_policy_lag=1)
    bench.runner()
    bench.fragment(steps=20)
    plan = bench.make_ready()
    bench.done(plan)
    assert bench.sent("runner", Committed) == [], "five steps of it are still to be trained"
    bench.fragment(steps=10)
    assert [(s.fragment.seq, s.first, s.num_steps) for s in bench.sent("learner-0", Shard)] == [
        (0, 15, 5),
        (1, 0, 10),
    ]


def test_data_older_than_the_lag_is_dropped_and_counted():
    bench = Bench()
    bench.driver(next_update=5)
    bench.learner(next_update=5)
    bench.weights(5)
    bench.open(5, batch=20, staleness=1, max_policy_lag=1)
    bench.runner()
    bench.fragment(steps=20, version=3)
    assert bench.state.ledger.accounting.dropped == {"stale": 20}
    bench.fragment(steps=20, version=4)
    assert len(bench.sent("learner-0", ShardPlan)) == 1


def test_a_duplicate_is_acknowledged_again_but_counted_once():
    bench = Bench()
    bench.ready_run(batch=40)
    bench.runner()
    bench.fragment(steps=20, seq=0)
    bench.fragment(steps=20, seq=0)
    assert bench.sent("runner", Accepted)[0].accepted == ((0, 0),)
    assert bench.state.ledger.accounting.sampled == 20
    assert bench.state.ledger.accounting.num_duplicates == 1


def test_a_fragment_with_more_steps_than_its_lease_is_rejected():
    bench = Bench()
    bench.ready_run(batch=40)
    bench.runner()
    bench.fragment(bench.leases()[0].lease_id, steps=41)
    assert bench.sent("runner", Rejected)[0].reason == "rejected"
    assert bench.sent("driver", Notice)[0].event == "bad_fragment"


def test_a_refused_fragment_is_dropped_quarantined_and_the_batch_planned_anew():
    bench = Bench()
    bench.ready_run(batch=20, staleness=1, max_policy_lag=1)
    bench.runner()
    bench.fragment(steps=10)
    bench.fragment(steps=10)
    (plan,) = bench.sent("learner-0", ShardPlan)
    bad = FragmentId("uuid-runner", 1, 0)
    bench.send("learner-0", ShardRefused(0, plan.attempt, 1, bad, "not_finite", "obs has NaN"))
    (item,) = [item for item in bench.out if isinstance(item, Quarantine)]
    assert item.fragment == bad
    assert bench.state.ledger.accounting.dropped == {"rejected": 10}
    bench.fragment(steps=10)
    (again,) = bench.sent("learner-0", ShardPlan)
    assert again.attempt > plan.attempt
    bench.send("learner-0", ShardReady(0, plan.attempt, 1, 0))
    assert bench.sent("learner-0", Train) == [], "READY of the void attempt"


def test_a_skipped_step_drops_its_data_and_the_run_goes_on():
    bench = Bench()
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    bench.done(bench.make_ready(), trained=False)
    (report,) = bench.sent("driver", UpdateReport)
    assert not report.trained
    assert report.dropped == {"skipped": 20}


def test_a_rebuilt_group_gets_the_untrained_update_again():
    bench = Bench()
    bench.ready_run(num_ranks=2, batch=20)
    bench.runner()
    bench.fragment(steps=20)
    out = bench.out
    plan = bench.make_ready(0)
    bench.out = out
    bench.make_ready(1)
    bench.learner(0, 1, generation=2)
    (again,) = bench.sent("learner-0", ShardPlan)
    assert (again.generation, again.num_env_steps) == (2, 20), "one rank left: the whole batch is its share"
    assert again.attempt > plan.attempt
    bench.done(plan, 0, 2)
    assert bench.sent("driver", UpdateReport) == [], "of the generation that is over"


def test_an_update_that_the_rebuilt_group_has_trained_is_committed():
    bench = Bench()
    bench.ready_run(num_ranks=2, batch=20)
    bench.runner()
    bench.fragment(steps=20)
    out = bench.out
    plan = bench.make_ready(0)
    bench.out = out
    bench.make_ready(1)
    bench.done(plan, 0, 2)
    bench.learner(0, 1, generation=2, next_update=1)
    assert bench.sent("driver", UpdateReport)[0].update_id == 0


def test_a_fragment_that_kills_three_times_is_quarantined():
    bench = Bench(death_limit=3)
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    for generation in (2, 3, 4):
        bench.make_ready()
        bench.learner(generation=generation, uuid=f"process-{generation}")
    assert [item.fragment.seq for item in bench.out if isinstance(item, Quarantine)] == [0]
    assert bench.state.ledger.accounting.dropped == {"quarantined": 20}
    assert bench.sent("learner-0", ShardPlan) == []


def test_only_the_dead_ranks_fragments_are_blamed():
    bench = Bench(death_limit=1)
    bench.ready_run(num_ranks=2, batch=40)
    bench.runner()
    bench.fragment(steps=20)
    bench.fragment(steps=20)
    out = bench.out
    bench.make_ready(0)
    bench.out = out
    bench.make_ready(1)
    bench.learner(0, 2, generation=2)
    bench.learner(1, 2, generation=2, uuid="replacement")
    assert [item.fragment.seq for item in bench.out if isinstance(item, Quarantine)] == [1]


def test_what_a_learner_lacks_is_sent_again():
    bench = Bench(resend_s=2.0)
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    (plan,) = bench.sent("learner-0", ShardPlan)
    bench.now = 2.0
    bench.send("learner-0", LearnerState(1, 0, (), (), (), (), 0))
    assert bench.sent("learner-0", ShardPlan) == [plan]
    assert len(bench.sent("learner-0", Shard)) == 1
    bench.send("learner-0", ShardReady(0, plan.attempt, 1, 0))
    bench.send("learner-0", ShardReady(0, plan.attempt, 1, 0))
    assert len(bench.sent("learner-0", Train)) == 1, "its TRAIN was lost"


def test_learners_may_forget_what_driver_and_runners_have():
    bench = Bench()
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    bench.done(bench.make_ready())
    assert bench.sent("learner-0", UpdateCommitted) == []
    bench.send("driver", DriverState(-1, 1))
    assert len(bench.sent("learner-0", UpdateCommitted)) == 1


def test_reports_are_repeated_until_the_driver_has_them():
    bench = Bench(resend_s=2.0, heartbeat_s=1.0)
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20)
    bench.done(bench.make_ready())
    bench.now = 2.0
    bench.event(Tick())
    assert len(bench.sent("driver", UpdateReport)) == 1
    bench.send("driver", DriverState(-1, 1))
    bench.now = 5.0
    bench.event(Tick())
    assert bench.sent("driver", UpdateReport) == []
    assert len(bench.sent("runner", BrokerBeat)) == 1


def test_a_reset_drops_the_old_lineage():
    bench = Bench()
    bench.ready_run(batch=40)
    bench.runner()
    bench.fragment(steps=20)
    bench.send("driver", Reset(7, 0))
    assert bench.state.ledger.accounting.dropped == {"rolled_back": 20}
    assert (bench.state.leases.leases, bench.state.open, bench.state.weights) == ({}, {}, None)
    bench.fragment(steps=20)
    assert bench.state.ledger.accounting.dropped == {"rolled_back": 40}
    bench.learner(generation=6)
    assert bench.sent("learner-0", Refused)[0].reason == "fenced"
    bench.learner(generation=7)
    assert len(bench.sent("learner-0", Welcome)) == 1


def test_learners_of_a_new_lineage_get_nothing_before_its_reset():
    bench = Bench()
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(steps=20, seq=0)  # its update is planned for learners that die
    bench.learner(generation=7, lineage=7)
    assert bench.sent("learner-0", ShardPlan) == []
    bench.send("driver", Reset(7, 0))
    bench.open(batch=20, min_generation=7)
    bench.fragment(steps=20, seq=1, generation=7)
    (plan,) = bench.sent("learner-0", ShardPlan)
    assert plan.generation == 7
    assert bench.state.ledger.accounting.dropped == {"rolled_back": 20}


# ------------------------------------------------------------------ a restarted broker


def test_a_new_broker_does_not_train_again_what_learners_report():
    bench = Bench()
    bench.driver(next_update=1, trained=20, dropped={"surplus": 3})
    bench.runner()
    bench.fragment(steps=20, seq=4)
    trained = [FragmentRange(FragmentId("uuid-runner", 1, 4), 0, 20)]
    bench.hello(
        "learner-0", "learner", tuple(pack_ranges(trained)), rank=0, num_ranks=1, generation=1, next_update=1
    )
    fragment = FragmentId("uuid-runner", 1, 4)
    assert bench.state.ledger.is_committed(fragment)
    assert bench.state.to_report == [(fragment, 20, bench.state.to_report[0][2])]
    assert bench.state.ledger.accounting.counts() == {"sampled": 23, "trained": 20, "pending": 0}


def test_a_new_broker_lets_an_update_in_training_finish():
    bench = Bench()
    bench.driver()
    ranges = [FragmentRange(FragmentId("uuid-runner", 1, 0), 0, 20)]
    payload = (*pack_ranges([]), *pack_ranges(ranges))
    fields = {"num_ranks": 2, "generation": 1, "training_attempts": (77,), "training_updates": (0,)}
    bench.hello("learner-0", "learner", payload, rank=0, **fields)
    bench.hello("learner-1", "learner", tuple(pack_ranges([])), rank=1, num_ranks=2, generation=1)
    bench.runner(next_seq=1)
    bench.fragment(steps=20)
    bench.open(0, batch=20, num_ranks=2)
    assert bench.sent("learner-1", ShardPlan) == [], "nothing is planned beside it"
    bench.send("learner-1", ShardReady(0, 77, 1, 1))
    (train,) = bench.sent("learner-1", Train)
    assert train.attempt == 77
    bench.done(train, 0, 2)
    bench.done(train, 1, 2)
    assert bench.sent("driver", UpdateReport)[0].accounting == {"sampled": 20, "trained": 20, "pending": 0}


def test_a_new_broker_waits_a_moment_for_the_data_of_a_trained_update():
    bench = Bench(recovery_grace_s=2.0)
    bench.driver()
    bench.open(0, batch=20)
    bench.learner(next_update=1)
    done = Train(1, 0, 77, 1, 20)
    ranges = pack_ranges([FragmentRange(FragmentId("uuid-runner", 1, 0), 0, 20)])
    from rlzmq.protocol.messages import UpdateDone

    bench.send("learner-0", UpdateDone(0, done.attempt, 1, 0, 1, True, 1), (b"r", *ranges))
    assert bench.sent("driver", UpdateReport) == []
    bench.now = 2.0
    bench.event(Tick())
    assert bench.sent("driver", UpdateReport)[0].accounting == {"sampled": 20, "trained": 20, "pending": 0}
    bench.runner(next_seq=1)
    bench.fragment(steps=20)
    assert bench.state.ledger.is_committed(FragmentId("uuid-runner", 1, 0))
    assert len(bench.state.to_report) == 1, "its meta comes with the next report"
    assert bench.state.ledger.accounting.counts() == {"sampled": 20, "trained": 20, "pending": 0}


# ------------------------------------------------------------------ weights


def test_weights_are_published_once_and_only_forward():
    bench = Bench()
    bench.learner()
    bench.weights(3)
    (published,) = [item for item in bench.out if isinstance(item, Publish)]
    assert open_publication(published.frame)[0].version == 3
    for version in (3, 2):
        bench.weights(version)
        assert bench.out == []
    bench.send("learner-0", Weights(1, 4), (publication(5),))
    assert bench.state.refused == {"weights": 1}


def test_late_joiners_get_the_latest_weights_and_those_behind_may_ask():
    bench = Bench()
    bench.learner()
    bench.weights(3)
    bench.runner()
    assert bench.sent("runner", Snapshot) == [Snapshot(1, 3)]
    bench.send("runner", SnapshotRequest(1, 2))
    assert bench.sent("runner", Snapshot) == [Snapshot(1, 3)]
    bench.send("runner", SnapshotRequest(1, 3))
    assert bench.out == []


def test_large_weights_are_only_announced():
    bench = Bench(push_weights_below_bytes=4)
    bench.learner()
    bench.weights(3)
    (published,) = [item for item in bench.out if isinstance(item, Publish)]
    assert not open_publication(published.frame)[0].has_body


def test_the_broker_asks_rank_0_for_weights_that_it_lacks():
    bench = Bench()
    bench.learner(next_update=2)
    bench.now = 1.0
    bench.event(Tick())
    assert bench.sent("learner-0", SnapshotRequest) == [SnapshotRequest(-1, -1)]


# ------------------------------------------------------------------ status


def test_status_says_what_an_observer_wants_to_know():
    bench = Bench()
    bench.ready_run(batch=40)
    bench.runner()
    bench.hello("top", "observer")
    bench.send("top", StatusRequest())
    ((message, payload),) = [(item.message, item.payload) for item in bench.out]
    assert message == Status()
    status = unpack_blob(payload[0])
    assert status["runners"][0]["num_leases"] == 2
    assert status["accounting"] == {"sampled": 0, "trained": 0, "pending": 0, "dropped": {}}
    assert status["weights"] == [1, 0]


def test_a_damaged_payload_of_a_known_peer_is_refused_and_nothing_changes():
    bench = Bench()
    bench.learner()
    bench.send("learner-0", Weights(1, 0), (b"not a publication",))
    assert bench.sent("learner-0", Rejected)[0].reason == "malformed"
    bench.hello("learner-1", "learner", (b"", b"x"), rank=0, num_ranks=1, generation=2)
    assert bench.sent("learner-1", Refused)[0].reason == "array"
    assert bench.state.generation == 1


def test_goodbye_frees_the_leases():
    bench = Bench()
    bench.ready_run(batch=4)
    bench.runner()
    bench.event(Received(b"runner", Goodbye("done"), (b"",)))
    assert bench.state.leases.leases == {}
    assert [item.message for item in bench.core.stop("bye")].count(Goodbye("bye")) == 2
