"""When a run as a whole counts as standing still, and who waits for whom then."""

from __future__ import annotations

from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.events import Tick
from rlzmq.wire.messages import Lease, Progress, RunnerState


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
