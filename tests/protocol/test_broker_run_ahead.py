"""The broker's leases in asynchronous runs: how far who may run ahead; and leases that are not there any more."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.wire.messages import Goodbye, LeaseReturned, Pause, Resume


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


def test_a_lease_is_never_more_than_the_slots_allow():
    bench = Bench(max_leases_per_runner=100)
    bench.ready_run(batch=90, staleness=1, max_policy_lag=1, fragment_length=40)
    bench.runner("a")
    assert _env_steps(bench, "a") == 160
    bench.runner("b")
    assert bench.leases("b") == [], "20 steps are left: less than its small lease of 40"


@pytest.mark.parametrize(
    ("staleness", "max_policy_lag", "max_s"),
    [(0, 3, 200.0), (1, -1, 200.0), (1, 0, 0.75), (1, 1, 0.75), (2, 2, 0.75), (3, 3, 1.5), (9, 4, 2.25)],
)
def test_a_lease_among_others_ends_after_three_quarters_of_the_time_in_which_its_data_grows_old(
    staleness, max_policy_lag, max_s
):
    """Updates of 40 env steps are committed every second; the runner that is asked for takes ten seconds for one."""
    bench = Bench(max_leases_per_runner=1, peer_timeout_s=1e4)
    terms = {"batch": 40, "staleness": staleness, "max_policy_lag": max_policy_lag, "lease_timeout_s": 30.0}
    bench.ready_run(**terms)
    bench.send("driver", Pause())
    bench.runner("fast")
    bench.runner("slow")
    for update_id in range(2):
        bench.now += 1.0
        bench.fragment(steps=40, runner="fast", version=update_id)
        bench.done(bench.make_ready())
        bench.weights(update_id + 1)
        bench.open(update_id + 1, **terms)
    bench.send("driver", Resume())
    bench.now += 200.0
    (trial,) = bench.state.leases.of_peer("uuid-slow")
    bench.fragment(trial.lease_id, steps=2, runner="slow", version=2)
    (lease,) = bench.leases("slow")
    assert lease.num_vector_steps * 4 == 20
    assert lease.max_s == pytest.approx(max_s if max_s < 100 else 2 * 20 / (2 / 200))


def _seen(seconds: float, timeout_s: float = 30.0) -> dict[str, float]:
    """`max_s` of the next lease of a runner that took so long for four steps, and of one that is new beside it."""
    bench = Bench(max_leases_per_runner=1, peer_timeout_s=1e4)
    bench.ready_run(batch=4000, lease_timeout_s=timeout_s)
    for name in ("hung", "a"):
        bench.runner(name)
    bench.now = seconds
    bench.fragment(bench.state.leases.of_peer("uuid-a")[0].lease_id, steps=4, runner="a")
    bench.runner("new")
    return {name: bench.state.leases.of_peer(f"uuid-{name}")[0].max_s for name in ("a", "new")}


def test_a_lease_is_cut_after_twice_its_time_and_that_of_a_new_runner_after_half_its_time_out_at_most():
    assert _seen(1.0) == {"a": 10.0, "new": 2.0}, "20 and 4 env steps at 4 env steps per second"
    assert _seen(10.0) == {"a": 100.0, "new": 15.0}


# ------------------------------------------------------------------ who is asked


def test_a_slow_runner_whose_second_lease_would_be_small_does_not_hold_up_a_fast_one():
    bench = Bench()
    bench.ready_run(batch=160)
    bench.send("driver", Pause())
    for name, seconds in (("a slow", 100.0), ("fast", 1.0)):
        bench.runner(name)
        bench.send("driver", Resume())
        bench.now += seconds
        (lease, *_) = bench.state.leases.of_peer(f"uuid-{name}")
        bench.fragment(lease.lease_id, steps=4, runner=name)
        bench.send("driver", Pause())
    for name in ("a slow", "fast"):
        for lease in bench.state.leases.of_peer(f"uuid-{name}"):
            bench.send(name, LeaseReturned(lease.lease_id, "later"))
    bench.send("driver", Resume())
    assert [len(bench.leases(name)) for name in ("a slow", "fast")] == [1, 2]


def _with_group_away(bench: Bench) -> None:
    """Nothing is planned: the data of a batch that is complete waits."""
    bench.send("learner-0", Goodbye("restarted"))


# ------------------------------------------------------------------ windows


def _size_of_one() -> int:
    bench = Bench()
    bench.runner()
    bench.fragment(steps=4)
    return bench.state.ledger.num_bytes


def _held_and_leased(**options) -> tuple[int, int]:
    """Uncommitted fragments, and leases, of a runner that runs ahead of a batch that is complete."""
    bench = Bench(max_leases_per_runner=100, **options)
    bench.ready_run(batch=4, staleness=100, max_policy_lag=100, fragment_length=1)
    _with_group_away(bench)
    bench.runner()
    for _ in range(2):
        bench.fragment(steps=4)
    for lease in bench.state.leases.of_peer("uuid-runner"):
        bench.send("runner", LeaseReturned(lease.lease_id, "all of them"))
    (runner,) = bench.core.status()["runners"]
    return runner["num_uncommitted"], runner["num_leases"]


@pytest.mark.parametrize(("less", "num_leases"), [(0, 5), (1, 4)])
def test_what_a_runner_holds_and_is_to_sample_fits_its_window_to_the_last_byte(less, num_leases):
    assert _held_and_leased(window_bytes=7 * _size_of_one() - less) == (2, num_leases)


@pytest.mark.parametrize(("less", "num_leases"), [(0, 6), (1, 5)])
def test_running_ahead_ends_with_the_lease_after_which_the_memory_is_full(less, num_leases):
    assert _held_and_leased(memory_bytes=7 * _size_of_one() - less) == (2, num_leases)
