"""When a run as a whole counts as standing still, and who waits for whom then."""

from __future__ import annotations

from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.events import Tick
from rlzmq.protocol.progress_deadlines import StandstillWatch
from rlzmq.wire.messages import Lease, Progress, RunnerState


def still_after(
    watch: StandstillWatch, *, moves: int = 0, patience_s: float = 0.0, limit: int = 2000
) -> int | None:
    """Seconds without a move from 1000 on until it is told; None: never."""
    watch.begin(1000.0)
    for second in range(1, limit):
        watch.look(moves, 1000.0 + second)
        if watch.is_still(patience_s, 1000.0 + second):
            return second
    return None


def test_a_minute_without_any_move_is_a_standstill():
    assert still_after(StandstillWatch()) == 61  # the first look is a move


def test_a_run_of_slow_updates_gets_ten_times_its_pace():
    watch = StandstillWatch()
    for number in range(20):
        watch.begin(number * 40.0)
        watch.end(number * 40.0 + 30.0)
    assert still_after(watch) == 301


def test_whoever_at_work_may_be_silent_for_long_is_given_twice_that_time():
    assert still_after(StandstillWatch(), patience_s=300.0) == 601


def test_envs_that_step_once_a_minute_are_no_standstill_however_long_the_batch_takes():
    watch = StandstillWatch()
    watch.begin(0.0)
    for second in range(1, 3600):
        watch.look(second // 55, float(second))
        assert not watch.is_still(0.0, float(second))


def test_nothing_counts_between_two_updates_nor_while_nobody_looked():
    watch = StandstillWatch()
    watch.begin(0.0)
    watch.look(0, 1.0)
    watch.end(2.0)
    assert not watch.is_still(0.0, 5000.0), "evaluation, a pause"
    watch.begin(5000.0)
    watch.look(0, 5001.0)
    watch.look(0, 9001.0)  # this process was stopped
    assert not watch.is_still(0.0, 9001.0)


def test_it_is_told_again_after_as_long_again():
    watch = StandstillWatch()
    assert still_after(watch) == 61
    assert not watch.is_still(0.0, 1062.0)
    watch.look(0, 1062.0)
    for second in range(1063, 1121):
        watch.look(0, float(second))
        assert not watch.is_still(0.0, float(second))
    watch.look(0, 1121.0)
    assert watch.is_still(0.0, 1121.0)


def progress_of(bench: Bench) -> Progress:
    bench.now += 1.0
    bench.event(Tick())
    (progress,) = bench.sent("driver", Progress)
    return progress


def test_env_steps_move_an_update_that_is_collected_and_not_one_that_is_trained():
    bench = bench_with_runner(batch=40)
    leases = [lease.lease_id for lease in bench.sent("runner", Lease)]

    def step(progress: int) -> int:
        state = RunnerState(0, 0, (), tuple(leases), True, 1, 0, -1, progress, 0)
        bench.send("runner", state)
        return progress_of(bench).num_moves

    assert [step(1), step(2), step(2), step(3)] == [1, 2, 2, 3]
    assert progress_of(bench).patience_s > 0
    assert "collecting update 0" in bench.core.status()["waits"][0]
    assert bench.core.status()["still_s"] == 2.0
    bench.fragment(leases.pop(0), steps=20)
    bench.fragment(leases.pop(0), steps=20)
    assert bench.state.runs
    collected = progress_of(bench).num_moves
    assert collected == 5
    assert step(4) == step(5) == collected
    assert "waits for READY of update 0 from learner-0" in bench.core.status()["waits"][0]


def test_what_is_missing_is_named():
    bench = Bench()
    assert bench.core.status()["waits"] == ["broker: waits for a driver"]
    bench.driver()
    assert bench.core.status()["waits"] == ["broker: waits for the driver to open update 0"]
    bench.open(0, batch=40)
    waits = "\n".join(bench.core.status()["waits"])
    assert "none is registered" in waits
    assert "waits for learners" in waits
