"""The broker's updates: exact batches, delivered, trained once, reported; also when ranks die."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.broker.updates import rank_of_env
from rlzmq.protocol.core import Quarantine
from rlzmq.wire.messages import (
    CommitReport,
    Committed,
    Notice,
    Rejected,
)


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
