"""What the driver asks of a broker and hears from it: lineages, updates, reports."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner, publication

from rlzmq.protocol.driver_core import parse_report
from rlzmq.protocol.events import PeerLost, Received, Tick
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges, unpack_blobs, unpack_ranges
from rlzmq.wire.messages import (
    Accepted,
    Committed,
    Config,
    ConfigRequest,
    DriverState,
    Fragment,
    Pause,
    Refused,
    Rejected,
    Reset,
    Resume,
    ShardPlan,
    ShardReady,
    TraceClock,
    TraceEvents,
    Train,
    UpdateCommitted,
    UpdateDone,
    UpdateReport,
    Weights,
)
from rlzmq.wire.schema import FragmentId


def _range(seq: int, num_steps: int = 20) -> FragmentRange:
    return FragmentRange(FragmentId("uuid-runner", 1, seq), 0, num_steps)


def _reports(bench: Bench) -> list[int]:
    return [report.update_id for report in bench.sent("driver", UpdateReport)]


def _trained(bench: Bench) -> UpdateReport:
    """Update 0 of twenty steps, committed."""
    bench.ready_run(batch=20)
    bench.runner()
    bench.fragment(bench.leases()[0].lease_id, steps=20)
    bench.done(bench.make_ready())
    (report,) = bench.sent("driver", UpdateReport)
    return report


# ------------------------------------------------------------------ a driver comes


def test_a_new_broker_counts_on_from_the_drivers_account():
    bench = Bench()
    bench.runner()
    bench.fragment(steps=7)
    bench.driver(next_update=2, trained=100, dropped={"stale": 5, "surplus": 3})
    accounting = bench.state.ledger.accounting
    assert accounting.counts() == {"sampled": 115, "trained": 100, "pending": 7}
    assert accounting.dropped == {"stale": 5, "surplus": 3}
    bench.driver(next_update=2, trained=100, dropped={"stale": 5, "surplus": 3})
    bench.driver(next_update=1, trained=50)
    assert accounting.counts() == {"sampled": 115, "trained": 100, "pending": 7}, "once"
    bench.driver(next_update=2, trained=120)
    assert accounting.counts() == {"sampled": 115, "trained": 100, "pending": 7}, "by its updates"


def test_a_driver_that_is_ahead_of_this_broker_adds_what_was_not_trained_here():
    bench = Bench()
    _trained(bench)
    bench.driver(next_update=3, trained=50)
    assert bench.state.ledger.accounting.counts() == {"sampled": 50, "trained": 50, "pending": 0}


def test_a_driver_that_comes_again_is_not_sent_what_it_has():
    bench = Bench()
    _trained(bench)
    bench.driver(next_update=1)
    assert _reports(bench) == []
    assert bench.sent("runner", Committed) == [Committed(1, 1, ())], "nobody needs it any more"


def test_two_updates_that_were_done_without_a_driver_are_committed_when_it_is_back():
    bench = Bench()
    bench.ready_run(batch=20, staleness=1)
    bench.open(1, batch=20, staleness=1, weights_version=0)
    bench.runner()
    for _ in range(2):
        bench.fragment(steps=20)
    runs = dict(bench.state.runs)
    bench.event(PeerLost(b"driver"))
    for update_id, run in runs.items():
        bench.send("learner-0", ShardReady(update_id, run.attempt, 1, 0))
        bench.done(Train(5, update_id, run.attempt, 1, 20))
    bench.driver()
    assert _reports(bench) == [0, 1]


def test_two_updates_whose_data_waited_for_learners_are_planned_when_they_are_there():
    bench = Bench()
    bench.driver()
    for update_id in range(2):
        bench.open(update_id, batch=20, staleness=1, weights_version=0)
    bench.runner()
    for _ in range(2):
        bench.fragment(steps=20)
    bench.learner()
    assert [plan.update_id for plan in bench.sent("learner-0", ShardPlan)] == [0, 1]


def test_what_was_counted_here_already_is_not_counted_again():
    bench = Bench()
    bench.runner()
    bench.fragment(steps=7, seq=0)
    bench.hello("other", "runner", name="runner", num_envs=4)
    bench.fragment(steps=4, seq=1)  # of a process that was superseded
    assert bench.state.ledger.accounting.dropped == {"fenced": 4}
    bench.driver(next_update=1, trained=0, dropped={"fenced": 9})
    assert bench.state.ledger.accounting.dropped == {"fenced": 9}
    bench.driver(next_update=2, trained=0, dropped={"fenced": 1})
    assert bench.state.ledger.accounting.dropped == {"fenced": 9}, "nothing becomes less"


def test_what_an_earlier_driver_left_open_below_is_void():
    bench = Bench()
    bench.driver()
    for update_id in range(4):
        bench.open(update_id)
    bench.driver(uuid="another", incarnation=9, next_update=2)
    assert bench.core.status()["open_updates"] == [2, 3]
    assert bench.core.status()["next_commit"] == 2
    bench.driver(uuid="third", incarnation=10, next_update=1)
    assert bench.core.status()["next_commit"] == 2


def test_updates_in_training_that_the_driver_has_reports_of_are_done():
    bench = Bench()
    bench.runner()
    bench.fragment(steps=20, seq=0)
    payload = (*pack_ranges([]), *pack_ranges([_range(0)]), *pack_ranges([_range(1)]))
    place = {"rank": 0, "num_ranks": 1, "training_updates": (0, 1), "training_attempts": (7, 8)}
    bench.hello("learner-0", "learner", payload, generation=1, **place)
    bench.driver(next_update=1, trained=20)
    assert bench.core.status()["updates_in_flight"] == [1]
    assert bench.state.ledger.accounting.counts() == {"sampled": 20, "trained": 20, "pending": 0}
    assert bench.state.ledger.is_committed(FragmentId("uuid-runner", 1, 0))


def test_what_was_sampled_before_the_drivers_lineage_is_dropped():
    bench = Bench()
    bench.runner()
    for generation in (1, 2, 3):
        bench.fragment(steps=10, generation=generation)
    bench.driver(next_update=4, generation=2)
    accounting = bench.state.ledger.accounting
    assert (accounting.dropped, accounting.pending) == ({"rolled_back": 10}, 20)
    bench.fragment(steps=5, generation=1)
    assert accounting.dropped == {"rolled_back": 15}


def test_a_driver_that_comes_again_gets_at_once_what_it_lacks_and_not_again_with_the_next_heartbeat():
    bench = Bench(resend_s=2.0, heartbeat_s=0.5)
    _trained(bench)
    bench.event(PeerLost(b"driver"))
    bench.now = 5.0
    bench.driver()
    assert _reports(bench) == [0]
    sent = []
    for halves in range(10, 20):
        bench.now = halves / 2
        bench.event(Tick())
        sent += [bench.now for _ in _reports(bench)]
    assert sent == [7.0, 9.0]


# ------------------------------------------------------------------ it asks


def test_an_update_that_is_asked_for_twice_is_open_since_the_first_time():
    bench = Bench()
    bench.driver()
    bench.open(0, batch=20)
    bench.now = 3.0
    bench.open(0, batch=40)
    assert "for 3.0 s: 0 of 20 env steps" in bench.core.status()["waits"][0]


def test_an_update_that_is_committed_is_not_opened_again():
    bench = Bench()
    _trained(bench)
    bench.open(0)
    assert bench.core.status()["open_updates"] == []
    bench.open(1)
    assert bench.core.status()["open_updates"] == [1]


def test_leases_ahead_of_what_is_open_go_by_the_newest_terms():
    bench = Bench()
    bench.ready_run(batch=20, staleness=9, max_policy_lag=9)
    for update_id, length in ((2, 3), (1, 4)):
        bench.open(update_id, batch=20, staleness=9, max_policy_lag=9, fragment_length=length)
    bench.send("driver", Pause())
    bench.runner()
    for _ in range(3):
        bench.fragment(steps=20)
    run = bench.state.runs[0]
    bench.send("learner-0", ShardReady(0, run.attempt, 1, 0))
    bench.done(bench.sent("learner-0", Train)[0])
    assert bench.core.status()["updates_in_flight"] == [1, 2]
    bench.send("driver", Resume())
    assert {lease.num_vector_steps for lease in bench.leases()} == {3}, "update 3 is not open: as for 2"


def test_a_reset_that_comes_late_or_twice_changes_nothing():
    bench = Bench()
    bench.ready_run(batch=40)
    bench.send("driver", Reset(7, 3))
    bench.open(3, min_generation=7)
    for generation in (6, 7):
        bench.send("driver", Reset(generation, 0))
        assert bench.core.status()["next_commit"] == 3
        assert bench.core.status()["open_updates"] == [3]


@pytest.mark.parametrize("generation", [6, 7])
def test_a_reset_leaves_learners_weights_and_data_of_its_own_generation(generation):
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.learner(generation=generation, lineage=7)
    bench.weights(0, generation=generation)
    bench.fragment(steps=10, generation=generation)
    bench.send("driver", Reset(7, 0))
    is_of_it = generation == 7
    status = bench.core.status()
    assert [learner["rank"] for learner in status["learners"]] == ([0] if is_of_it else [])
    assert (status["weights"], status["generation"]) == (([7, 0], 7) if is_of_it else (None, -1))
    assert bench.state.ledger.accounting.dropped == ({} if is_of_it else {"rolled_back": 10})
    assert status["accounting"]["pending"] == (10 if is_of_it else 0)


def test_a_reset_ends_leases_plans_and_slots():
    bench = Bench(max_leases_per_runner=100)
    bench.ready_run(batch=20, staleness=1, max_policy_lag=1)
    bench.runner()
    leases = bench.leases()
    bench.fragment(leases[0].lease_id, steps=20)
    bench.done(bench.make_ready())  # its weights are not out yet
    bench.fragment(leases[1].lease_id, steps=20)
    bench.send("driver", Reset(2, 0))
    status = bench.core.status()
    assert (status["num_env_steps_leased"], status["updates_in_flight"]) == (0, [])
    bench.learner(generation=2, lineage=2)
    bench.weights(0, generation=2)
    bench.open(0, batch=20, staleness=1, max_policy_lag=1, min_generation=2)
    assert sum(lease.num_vector_steps for lease in bench.leases()) * 4 == 40, "both slots are free"


def test_after_a_reset_reports_of_the_old_lineage_are_not_sent_again():
    bench = Bench(resend_s=2.0)
    _trained(bench)
    bench.send("driver", Reset(2, 0))
    assert bench.sent("runner", Committed) == [Committed(1, 1, ())], "nobody needs it any more"
    bench.now = 5.0
    bench.event(Tick())
    assert _reports(bench) == []


def test_a_config_without_content_replaces_none():
    bench = Bench()
    bench.driver()
    bench.send("driver", Config("run", "digest"), (b"the config",))
    bench.send("driver", Config("run", "other"))
    bench.send("new", ConfigRequest())
    (config,) = bench.sent("new", Config)
    assert config.config_digest == "digest"


# ------------------------------------------------------------------ it hears


def test_a_report_says_how_long_sampling_and_training_took():
    bench = Bench()
    bench.now = 1.0
    bench.ready_run(batch=20)
    bench.runner()
    bench.now = 3.0
    bench.fragment(steps=20)
    plan = bench.make_ready()
    bench.now = 7.0
    bench.done(plan)
    (report,) = bench.sent("driver", UpdateReport)
    assert (report.sampling_s, report.training_s) == (2.0, 4.0)
    assert (report.broker_incarnation, report.min_generation, report.generation) == (5, -1, 1)
    assert (report.num_env_steps, report.num_trained_steps) == (20, 1)


def test_of_a_plan_of_another_broker_all_time_is_that_of_sampling():
    bench = Bench(recovery_grace_s=0.0)
    bench.driver()
    bench.learner()
    bench.now = 1.0
    bench.open(0, batch=20)
    bench.now = 6.0
    bench.send("learner-0", UpdateDone(0, 77, 1, 0, 1, True, 20), (b"r", *pack_ranges([_range(0)])))
    (report,) = bench.sent("driver", UpdateReport)
    assert (report.sampling_s, report.training_s) == (5.0, 0.0)
    assert (report.versions, report.version_steps) == ((), ()), "of what is not here nothing is known"


def test_results_come_in_the_order_of_ranks_whoever_was_first():
    bench = bench_with_runner(num_ranks=2, batch=20, steps=20)
    plan = bench.both_ready()
    ranges = tuple(pack_ranges(bench.state.runs[0].ranges))
    for rank, steps in ((1, 12), (0, 9)):
        message = UpdateDone(0, plan.attempt, 1, rank, 2, True, steps)
        bench.send(f"learner-{rank}", message, (b"rank %d" % rank, *ranges))
    (sent,) = [item for item in bench.out if isinstance(item.message, UpdateReport)]
    report = parse_report(sent.message, sent.payload)
    assert [bytes(result) for result in report.results] == [b"rank 0", b"rank 1"]
    assert report.report.num_trained_steps == 21, "of all ranks"


def test_a_result_in_another_ranks_name_is_ignored():
    bench = bench_with_runner(batch=20, steps=20)
    plan = bench.make_ready()
    message = UpdateDone(0, plan.attempt, 1, 1, 2, True, 20)
    bench.send("learner-0", message, (b"r", *pack_ranges(bench.state.runs[0].ranges)))
    assert _reports(bench) == []
    bench.done(plan)
    assert _reports(bench) == [0]


def test_only_confirmed_reports_are_let_go():
    bench = Bench(resend_s=2.0)
    _trained(bench)
    for min_generation, next_report, is_let_go in ((-1, 0, False), (3, 1, False), (-1, 1, True)):
        bench.send("driver", DriverState(min_generation, next_report))
        assert bool(bench.sent("runner", Committed)) is is_let_go
        assert bench.sent("learner-0", UpdateCommitted) == ([UpdateCommitted(0, 1)] if is_let_go else [])


def test_a_result_that_comes_again_is_confirmed_once_the_driver_has_its_report():
    bench = Bench()
    _trained(bench)
    again = UpdateDone(0, 1, 1, 0, 1, True, 20)
    payload = (b"r", *pack_ranges([_range(0)]))
    bench.send("learner-0", again, payload)
    assert bench.sent("learner-0", UpdateCommitted) == []
    bench.send("driver", DriverState(-1, 1))
    bench.send("learner-0", again, payload)
    assert bench.sent("learner-0", UpdateCommitted) == [UpdateCommitted(0, 1)]
    assert [learner["next_update"] for learner in bench.core.status()["learners"]] == [1]


@pytest.mark.parametrize(("trained", "num_trained_steps"), [(True, 20), (False, 0)])
def test_a_report_counts_the_steps_that_were_trained(trained, num_trained_steps):
    """Where no rank that trained it is there any more, they are taken for those of the batch."""
    bench = Bench(recovery_grace_s=0.0)
    bench.driver()
    if trained:
        payload = (*pack_ranges([]), *pack_ranges([_range(0)]))
        place = {"rank": 0, "num_ranks": 1, "training_updates": (0,), "training_attempts": (7,)}
        bench.hello("learner-0", "learner", payload, generation=1, **place)
        bench.learner(generation=2, next_update=1, uuid="another")
    else:
        bench.learner()
        message = UpdateDone(0, 7, 1, 0, 1, False, 9)
        bench.send("learner-0", message, (b"results", *pack_ranges([_range(0)])))
    bench.open(0, batch=20)
    (report,) = bench.sent("driver", UpdateReport)
    assert (report.num_env_steps, report.num_trained_steps) == (20, num_trained_steps)


def test_a_report_tells_the_whole_fragments_that_ended_and_their_metas():
    bench = bench_with_runner(batch=20, steps=18)
    frames = bench.state.ledger.entries[FragmentId("uuid-runner", 1, 0)].frames
    message = Fragment("uuid-runner", 1, 1, 0, 2, 1, 0, -1, {})
    bench.event(Received(b"runner", message, frames[:1]))  # a frame for the meta is missing
    plan = bench.make_ready()
    bench.fragment(steps=6, seq=2)  # more than the batch: it is dropped, and told of
    bench.done(plan)
    (sent,) = [item for item in bench.out if isinstance(item.message, UpdateReport)]
    assert unpack_ranges(sent.payload[:2]) == [_range(0, 18), _range(1, 2), _range(2, 6)]
    metas = [bytes(meta) for meta in unpack_blobs(sent.payload[2:4])]
    assert [bool(meta) for meta in metas] == [True, False, True]
    assert metas[0] == bytes(frames[-1])


# ------------------------------------------------------------------ what is dropped when


def test_what_was_sampled_with_the_next_weights_is_kept_for_the_next_update():
    bench = bench_with_runner(batch=20, steps=20)
    plan = bench.make_ready()
    bench.weights(1)
    for version in (0, 1):
        bench.fragment(steps=6 + version, version=version)
    bench.done(plan)
    assert bench.state.ledger.accounting.dropped == {"surplus": 6}
    assert bench.state.ledger.accounting.pending == 7


def test_of_data_at_the_bound_only_what_is_older_is_dropped():
    bench = Bench()
    bench.driver(next_update=3)
    bench.learner(next_update=3)
    bench.weights(3)
    bench.runner()
    for version in (1, 2, 3):
        bench.fragment(steps=version, version=version)
    bench.open(3, batch=20, staleness=1, max_policy_lag=1)
    assert bench.state.ledger.accounting.dropped == {"stale": 1}


def test_data_of_batches_smaller_than_a_vector_step_may_be_as_old_as_the_batches_that_one_fills():
    bench = Bench()
    terms = {"batch": 1, "staleness": 1, "max_policy_lag": 1}
    bench.ready_run(**terms)
    bench.runner()
    bench.fragment(steps=4)
    for update_id in range(4):
        run = bench.state.runs[update_id]
        bench.send("learner-0", ShardReady(update_id, run.attempt, 1, 0))
        bench.done(Train(5, update_id, run.attempt, 1, 1))
        bench.weights(update_id + 1)
        bench.open(update_id + 1, **terms)
    assert bench.state.ledger.accounting.counts() == {"sampled": 4, "trained": 4, "pending": 0}


def test_on_policy_data_of_other_versions_is_surplus():
    bench = Bench()
    _trained(bench)
    bench.fragment(steps=6)
    bench.weights(1)
    bench.open(1, batch=20)
    assert bench.state.ledger.accounting.dropped == {"surplus": 6}
    bench.fragment(steps=20, version=1)
    assert [plan.update_id for plan in bench.sent("learner-0", ShardPlan)] == [1]


def test_with_staleness_two_updates_are_in_flight_and_without_one():
    for staleness, in_flight in ((0, [0]), (1, [0, 1])):
        bench = Bench()
        bench.ready_run(batch=20, staleness=staleness)
        for update_id in (1, 2):
            bench.open(update_id, batch=20, staleness=staleness, weights_version=0)
        bench.runner()
        for _ in range(3):
            bench.fragment(steps=20)
        assert bench.core.status()["updates_in_flight"] == in_flight


def test_an_update_is_planned_when_its_last_step_is_there():
    bench = bench_with_runner(batch=20, steps=19)
    assert bench.sent("learner-0", ShardPlan) == []
    bench.fragment(steps=1)
    (plan,) = bench.sent("learner-0", ShardPlan)
    assert (plan.num_env_steps, plan.num_fragments, plan.num_env_steps_all_ranks) == (20, 2, 20)


def test_an_update_is_committed_only_while_a_driver_is_there():
    bench = bench_with_runner(batch=20, steps=20)
    plan = bench.make_ready()
    bench.event(PeerLost(b"driver"))
    bench.done(plan)
    assert bench.core.status()["next_commit"] == 0
    bench.driver()
    assert _reports(bench) == [0]
    assert bench.core.status()["next_commit"] == 1


def test_weights_are_those_of_rank_0_and_of_this_run():
    bench = Bench()
    bench.learner(0, 2)
    bench.learner(1, 2)
    wrong = [
        ("learner-1", Weights(1, 0), (publication(0),)),
        ("learner-0", Weights(2, 0), (publication(0, generation=2),)),
        ("learner-0", Weights(1, 0), (publication(0, run_id="another"),)),
        ("learner-0", Weights(1, 0), ()),
    ]
    for number, (peer, message, payload) in enumerate(wrong, start=1):
        bench.send(peer, message, payload)
        assert bench.state.refused == {"weights": number}
        assert bench.core.status()["weights"] is None
    assert bench.send("learner-0", Weights(1, 0), (publication(0),))
    assert bench.core.status()["weights"] == [1, 0]


def test_a_stranger_is_told_nothing_of_acceptance():
    bench = Bench()
    bench.fragment(steps=20)
    assert bench.sent("runner", Accepted) == []
    assert bench.sent("runner", Refused)[0].reason == "unknown_peer"


# ------------------------------------------------------------------ the trace


def test_stages_of_other_hosts_go_to_the_driver_one_message_at_a_time_and_its_clock_to_their_sender():
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.runner("other")

    def forwarded(peer, sent_s, payload=b"stages"):
        bench.send(peer, TraceEvents(sent_s, "forged"), (payload,))
        return [(message.source, message.sent_s) for message in bench.sent("driver", TraceEvents)]

    assert forwarded("runner", 1.0) == [("uuid-runner", 1.0)]
    assert forwarded("runner", 2.0) == [], "the first one is not answered"
    assert forwarded("other", 3.0) == [("uuid-other", 3.0)]
    bench.send("driver", TraceClock("uuid-runner", 1.0, 9.0))
    assert bench.sent("runner", TraceClock) == [TraceClock("uuid-runner", 1.0, 9.0)]
    assert bench.sent("other", TraceClock) == []
    assert forwarded("runner", 4.0) == [("uuid-runner", 4.0)]
    bench.now += 1.0
    assert forwarded("runner", 5.0) == [("uuid-runner", 5.0)], "the answer was lost"
    bench.now += 1.0
    assert forwarded("runner", 6.0, bytes(2 << 20)) == []
    assert bench.sent("runner", Rejected)[-1].reason == "bound"
