"""The broker's leases, and its updates: exact batches, delivered, trained once, reported; also when ranks die."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.broker.updates import rank_of_env
from rlzmq.protocol.core import Quarantine
from rlzmq.wire.messages import (
    CommitReport,
    Committed,
    Goodbye,
    LeaseReturned,
    Notice,
    Refused,
    Rejected,
    RunnerState,
    ShardPlan,
    ShardReady,
    Welcome,
)


def test_a_peer_that_keeps_sending_what_no_peer_sends_is_expelled_and_its_place_is_free():
    bench = bench_with_runner(batch=400)
    for _ in range(9):
        bench.refuse("runner", "dtype", "array 0: dtype 'O'")
        assert bench.sent("runner", Refused) == []
    bench.runner()  # saying HELLO again wipes nothing out
    bench.refuse("runner", "dtype", "array 0: dtype 'O'")
    assert bench.sent("runner", Refused)[0].reason == "expelled"
    assert bench.sent("driver", Notice)[-1].event == "expelled"
    assert bench.state.leases.leased_env_steps() == 0, "its leases are free"
    assert bench.fragment(steps=20) is not None
    assert bench.sent("runner", Rejected)[0].reason == "fenced"
    bench.runner()
    assert bench.sent("runner", Refused)[0].reason == "fenced"
    bench.runner(uuid="another", incarnation=0)
    assert bench.sent("runner", Welcome)


def _says(lease_ids, *, progress=0, is_sampling=True, unaccepted=(), pace_s=0.0):
    return RunnerState(0, unaccepted, tuple(lease_ids), is_sampling, -1, progress, pace_s)


def test_a_lease_without_progress_is_kept_while_nobody_else_is_free():
    bench = Bench(peer_timeout_s=1e4)
    bench.ready_run(batch=20, lease_timeout_s=30.0)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.now = 1000.0
    bench.tick()
    assert bench.state.leases.of_peer("uuid-a"), "what it delivers late would be wasted"
    bench.runner("b")
    bench.tick()
    assert [notice.event for notice in bench.sent("driver", Notice)] == ["lease_expired"]
    assert len(bench.leases("b")) == 1
    assert bench.leases("a") == [], "a is suspect"
    bench.fragment(lease.lease_id, steps=20, runner="a")
    assert bench.sent("learner-0", ShardPlan)[0].num_env_steps == 20, "what comes late still counts"


def test_a_runner_that_shows_progress_and_delivers_nothing_loses_its_lease_and_gets_no_other():
    bench = Bench(peer_timeout_s=1e4)
    bench.ready_run(batch=20, lease_timeout_s=30.0)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.runner("b")
    told = []
    for second in range(1, 61):
        bench.now = float(second)
        bench.send("a", _says([lease.lease_id], progress=1 + second, pace_s=1.0))
        bench.tick()
        told += [notice.event for notice in bench.sent("driver", Notice)]
    assert told == ["lease_expired"], "its time-out twice: it has shown no pace"
    (rest,) = bench.state.leases.of_peer("uuid-b")
    for message in (_says([], progress=99), _says([], is_sampling=False)):
        bench.now += 1.0
        bench.send("a", message)
        assert bench.leases("a") == []
    bench.send("b", LeaseReturned(rest.lease_id, "leaving"))
    bench.send("b", Goodbye("leaving"))
    assert bench.leases("a") == []
    bench.fragment(lease.lease_id, steps=4, runner="a")
    assert len(bench.leases("a")) == 1, "it has delivered"


def test_a_runner_that_has_shown_nothing_yet_gets_one_small_lease_beside_others():
    bench = Bench()
    bench.ready_run(batch=1600, fragment_length=40, lease_timeout_s=60.0)
    bench.runner("a")
    bench.runner("b")
    (lease,) = bench.leases("b")
    assert (lease.num_vector_steps, lease.max_s) == (10, 30.0)
    bench.now = 1.0
    bench.fragment(lease.lease_id, steps=40, runner="b")
    assert bench.leases("b")[0].num_vector_steps > 10


def test_what_a_runner_claims_counts_only_once_it_has_shown_it():
    bench = Bench(peer_timeout_s=1e4)
    bench.ready_run(batch=400)
    bench.runner("a")
    bench.fragment(bench.leases("a")[0].lease_id, steps=20, runner="a")
    assert bench.state.most_envs == 4
    bench.runner("b", num_envs=2**20)
    (lease,) = bench.leases("b")
    assert bench.state.leases.leases[lease.lease_id].counted_env_steps == 4
    assert bench.state.leases.leased_env_steps() < 100, "others sample the rest"
    bench.fragment(lease.lease_id, steps=64, runner="b")
    assert bench.state.most_envs == 64, "it may have more than others, and deliver more"
    bench.send("b", Goodbye("leaving"))
    assert bench.state.most_envs == 4, "nor does it widen the bound on staleness for ever"


@pytest.mark.parametrize(
    ("names", "num_busy"), [(("a@far", "b@farther", "c@farthest"), 1), (("a@far", "b@far", "c@far"), 3)]
)
def test_a_batch_that_takes_less_time_than_its_way_goes_to_one_host_whose_runners_divide_it(names, num_busy):
    """Each samples 100 env steps in the time of a lease's way, and to each host weights travel once."""
    bench = Bench(peer_timeout_s=1e4)
    bench.ready_run(batch=80, fragment_length=20)
    plans = []
    for name in names:
        bench.runner(name)
    while not plans:
        for name in names:
            for lease in bench.state.leases.of_peer(f"uuid-{name}"):
                bench.now += 1.0
                steps = lease.num_env_steps
                bench.fragment(lease.lease_id, steps=steps, runner=name, busy_s=steps / (100 + steps))
                plans += bench.sent("learner-0", ShardPlan)
    (plan,) = plans
    bench.send("learner-0", ShardReady(plan.update_id, plan.attempt, plan.generation, 0))
    bench.done(plan)
    bench.weights(1)
    bench.open(1, batch=80, fragment_length=20)
    held = [bench.state.leases.held_env_steps(f"uuid-{name}") for name in names]
    assert sum(map(bool, held)) == num_busy


def test_only_a_lease_that_is_out_can_be_returned_and_only_by_its_holder():
    bench = Bench()
    bench.ready_run(batch=20)
    bench.runner("a")
    (lease,) = bench.leases("a")
    bench.runner("b")
    for peer, lease_id in (("a", lease.lease_id + 1), ("b", lease.lease_id)):
        bench.send(peer, LeaseReturned(lease_id, "not its own"))
        assert list(bench.state.leases.leases) == [lease.lease_id]
    assert bench.state.refused == {}


# ------------------------------------------------------------------ running ahead


def test_a_runner_whose_window_is_full_does_not_hold_up_the_others():
    bench = Bench(max_leases_per_runner=3, window_bytes=1)
    bench.ready_run(batch=40, staleness=9, max_policy_lag=9)
    bench.runner("full")
    bench.fragment(bench.leases("full")[0].lease_id, steps=20, runner="full")
    for lease in bench.state.leases.of_peer("uuid-full"):
        bench.send("full", LeaseReturned(lease.lease_id, "outdated"))
    covering = bench.state.leases.of_peer("uuid-full")
    assert sum(lease.num_env_steps for lease in covering) == 20, "what the batch lacks, no more"
    bench.runner("other")
    assert bench.leases("other")
    assert bench.leases("full") == []


@pytest.mark.parametrize("batch", [20, 39])
def test_runners_that_are_free_at_once_get_no_more_than_the_slots_allow_in_all(batch):
    bench = Bench()
    bench.ready_run(batch=batch, staleness=1, max_policy_lag=1, fragment_length=40)
    with bench.grants_nothing():
        for name in "abc":
            bench.runner(name)
    bench.tick()
    assert [bench.state.leases.held_env_steps(f"uuid-{name}") for name in "abc"] == [40, 0, 0]


def test_a_fragment_with_more_steps_than_its_lease_is_rejected():
    bench = bench_with_runner(batch=40)
    bench.fragment(bench.leases()[0].lease_id, steps=41)
    assert bench.sent("runner", Rejected)[0].reason == "rejected"
    assert bench.sent("driver", Notice)[0].event == "bad_fragment"
    assert bench.core.status()["runners"][0]["num_bad"] == 1


def test_a_skipped_step_drops_its_data_and_the_run_goes_on():
    bench = bench_with_runner(batch=20, steps=20)
    bench.done(bench.make_ready(), trained=False)
    (report,) = bench.sent("driver", CommitReport)
    assert (report.num_env_steps, report.num_kept_steps) == (20, 0)
    assert report.dropped == {"skipped": 20}


@pytest.mark.parametrize(("version", "generation"), [(1, 1), (10**6, 1), (0, 2)])
def test_a_fragment_of_weights_that_nobody_has_made_is_refused(version, generation):
    bench = bench_with_runner(batch=20)
    bench.fragment(steps=10, version=version, generation=generation)
    (rejected,) = bench.sent("runner", Rejected)
    assert rejected.reason == "rejected"
    assert [notice.event for notice in bench.sent("driver", Notice)] == ["bad_fragment"]
    assert bench.state.ledger.accounting.dropped == {"rejected": 10}
    bench.fragment(steps=10)
    assert len(bench.state.ledger.entries) == 1


def test_a_fragment_of_weights_that_died_with_their_rank_is_stale_and_nobodys_fault():
    bench = bench_with_runner(num_ranks=2, batch=20)
    bench.learner(0, 1, generation=2, uuid="uuid-survivor", next_update=0)
    bench.fragment(steps=10, version=1, generation=1)
    assert bench.state.ledger.accounting.dropped == {"stale": 10}
    assert bench.sent("runner", Committed)
    assert bench.sent("driver", Notice) == []
    bench.fragment(steps=10, version=0, generation=1)
    assert bench.state.ledger.accounting.pending == 10, "those before it live on"


def test_only_the_dead_ranks_fragments_are_blamed():
    bench = Bench(death_limit=1)
    bench.ready_run(num_ranks=2, batch=40)
    bench.runner()
    bench.fragment(steps=20)
    bench.fragment(steps=20)
    bench.both_ready()
    bench.learner(0, 2, generation=2)
    bench.learner(1, 2, generation=2, uuid="replacement")
    assert [item.fragment.seq for item in bench.out if isinstance(item, Quarantine)] == [1]


@pytest.mark.parametrize(("staleness", "expected"), [(0, ["a", "a", "b", "b"]), (1, ["b", "a", "b", "a"])])
def test_an_on_policy_batch_does_not_depend_on_who_was_first(staleness, expected):
    """By runner, then as it was sampled. With staleness what came first is trained first: that bounds its age."""
    bench = Bench()
    bench.ready_run(num_ranks=2, batch=40, staleness=staleness)
    for name in ("b", "a"):
        bench.runner(name)
    for name in ("b", "a", "b", "a"):
        bench.fragment(steps=10, runner=name)
    (run,) = bench.state.plans.values()
    assert [item.fragment.runner for item in run.ranges] == [f"uuid-{name}" for name in expected]
    assert [len(shard) for shard in run.shards] == [2, 2]
    of_a = [item.fragment.seq for item in run.ranges if item.fragment.runner == "uuid-a"]
    assert of_a == [0, 1]


def test_environments_go_to_ranks_in_blocks_from_the_runners_number_on() -> None:
    assert [rank_of_env("runner-1", env, 4, 4) for env in range(4)] == [1, 2, 3, 0]
    assert [rank_of_env("runner-2", env, 6, 3) for env in range(6)] == [2, 2, 0, 0, 1, 1]
