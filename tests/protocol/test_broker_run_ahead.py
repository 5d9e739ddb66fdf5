"""The broker's leases in asynchronous runs: how far who may run ahead; and leases that are not there any more."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.protocol.events import Tick
from rlzmq.wire.messages import LeaseReturned, Pause, Resume, RunnerState


def _idle(lease_ids: tuple[int, ...] = ()) -> RunnerState:
    return RunnerState(0, 0, (), lease_ids, False, 1, 0, -1, 0, 0)


def _env_steps(bench: Bench, runner: str = "runner", num_envs: int = 4) -> int:
    """Leased to a runner by the last output."""
    return sum(lease.num_vector_steps for lease in bench.leases(runner)) * num_envs


# ------------------------------------------------------------------ leases that are not there


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


def test_an_idle_runner_that_had_let_a_lease_expire_gets_another():
    bench = Bench(peer_timeout_s=1e4)
    bench.ready_run(batch=20, lease_timeout_s=3.0)
    bench.runner("a")
    bench.send("a", RunnerState(0, 0, (), (1,), True, 1, 0, -1, 7, 0))
    bench.runner("b")
    bench.now = 3.0
    bench.event(Tick())
    assert [runner["is_suspect"] for runner in bench.core.status()["runners"]] == [True, False]
    assert bench.leases("a") == []
    bench.send("a", _idle())
    assert [runner["is_suspect"] for runner in bench.core.status()["runners"]] == [False, False]
    assert bench.leases("a")


def test_the_time_that_a_runner_is_idle_is_not_its_pace():
    bench = Bench(peer_timeout_s=1e4)
    bench.ready_run(batch=400, lease_timeout_s=30.0)
    bench.runner()
    (lease, _) = bench.leases()
    for progress, now in ((1, 0.0), (2, 1.0)):
        bench.now = now
        bench.send("runner", RunnerState(0, 0, (), (lease.lease_id,), True, 1, 0, -1, progress, 0))
    bench.fragment(lease.lease_id, steps=20)
    usual_s = bench.state.runners["uuid-runner"].watch.usual_s()
    for now in (2.0, 500.0):
        bench.now = now
        bench.send("runner", RunnerState(0, 1, (), (), False, 1, 0, -1, 2, 0))
    bench.now = 501.0
    bench.send("runner", RunnerState(0, 1, (), (9,), True, 1, 0, -1, 3, 0))
    assert bench.state.runners["uuid-runner"].watch.usual_s() == usual_s == 1.0


def test_a_lease_that_is_on_its_way_is_not_granted_anew():
    bench = Bench(resend_s=2.0)
    bench.now = 10.0
    bench.ready_run(batch=4)
    bench.runner()
    bench.now = 11.5
    bench.send("runner", _idle())
    assert bench.leases() == []
    bench.now = 12.0
    bench.send("runner", _idle())
    assert len(bench.leases()) == 1


# ------------------------------------------------------------------ running ahead


@pytest.mark.parametrize(("batch", "leased"), [(40, 40), (41, 60)])
def test_without_memory_to_run_ahead_exactly_the_next_batch_is_leased(batch, leased):
    bench = Bench(max_leases_per_runner=100, memory_bytes=-1)
    bench.ready_run(batch=batch, staleness=1, max_policy_lag=1)
    bench.runner()
    leases = bench.leases()
    assert _env_steps(bench) == leased
    bench.fragment(leases[0].lease_id, steps=20)
    assert bench.leases() == [], "what came and what is leased cover it"


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


def test_a_runner_of_many_envs_that_does_not_fit_does_not_hold_up_one_of_few():
    bench = Bench(max_leases_per_runner=3)
    bench.ready_run(batch=50, staleness=1, max_policy_lag=1)
    bench.runner("a", num_envs=4)
    assert _env_steps(bench, "a") == 60
    bench.send("driver", Pause())
    bench.runner("large", num_envs=64)
    bench.runner("small", num_envs=4)
    bench.send("driver", Resume())
    assert bench.leases("large") == [], "of two batches 60 steps are taken"
    assert _env_steps(bench, "small") == 4


def _three_at_once(batch: int, **terms) -> list[list[int]]:
    """Env steps of each runner's leases, of three that are free when leases begin."""
    bench = Bench()
    bench.ready_run(batch=batch, **terms)
    bench.send("driver", Pause())
    for name in "abc":
        bench.runner(name)
    bench.send("driver", Resume())
    return [[lease.num_env_steps for lease in bench.state.leases.of_peer(f"uuid-{name}")] for name in "abc"]


@pytest.mark.parametrize("batch", [20, 39])
def test_runners_that_are_free_at_once_get_no_more_than_the_slots_allow_in_all(batch):
    assert _three_at_once(batch, staleness=1, max_policy_lag=1, fragment_length=40) == [[40], [], []]


def test_a_batch_is_dealt_out_to_all_runners_that_are_not_suspect():
    assert _three_at_once(40, fragment_length=50) == [[16], [16], [8]]


def test_a_lease_is_never_more_than_the_slots_allow():
    bench = Bench(max_leases_per_runner=100)
    bench.ready_run(batch=90, staleness=1, max_policy_lag=1, fragment_length=40)
    bench.runner("a")
    assert _env_steps(bench, "a") == 160
    bench.runner("b")
    assert bench.leases("b") == [], "20 steps are left: less than its small lease of 40"


def test_messages_that_are_not_trained_yet_count_against_the_window_with_the_leases():
    bench = Bench(max_leases_per_runner=100, window_messages=0)
    bench.ready_run(batch=20, staleness=9, max_policy_lag=9)
    bench.runner()
    for _ in range(15):  # of each lease autoresets have left one step
        bench.fragment(bench.state.leases.of_peer("uuid-runner")[0].lease_id, steps=1)
    (runner,) = bench.core.status()["runners"]
    assert (runner["num_uncommitted"], runner["num_leases"]) == (15, 5), "of twenty"


def test_a_lease_of_unknown_pace_is_cut_after_half_its_time_out():
    bench = Bench()
    bench.ready_run(batch=4000, lease_timeout_s=30.0)
    for name in "ab":
        bench.runner(name)
    bench.fragment(bench.state.leases.of_peer("uuid-b")[0].lease_id, steps=0, runner="b")
    assert bench.state.runners["uuid-b"].has_worked
    assert {lease.max_s for lease in bench.leases("b")} == {15.0}
