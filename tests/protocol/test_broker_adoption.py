"""What a broker keeps and what it plans again, by what each rank says it has trained or was told to train."""

from __future__ import annotations

from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.events import Quarantine
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges
from rlzmq.wire.messages import ShardPlan, UpdateDone, UpdateReport


def _range(seq: int, first: int = 0, num_steps: int = 20) -> FragmentRange:
    return FragmentRange(FragmentId("uuid-runner", 1, seq), first, num_steps)


def _join(
    bench: Bench,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    next_update: int = 0,
    trained: tuple[FragmentRange, ...] = (),
    training: dict[int, FragmentRange] | None = None,
    **fields,
) -> None:
    """A rank registers; `training`: what each update takes that another broker told it to train, as attempt 77."""
    training = training or {}
    payload = [*pack_ranges(trained)]
    for item in training.values():
        payload += pack_ranges([item])
    values = {
        "generation": 1,
        "training_updates": tuple(training),
        "training_attempts": (77,) * len(training),
    }
    place = {"rank": rank, "num_ranks": num_ranks, "next_update": next_update}
    bench.hello(f"learner-{rank}", "learner", tuple(payload), **{**values, **place, **fields})


def _done(bench: Bench, update_id: int, *ranges: FragmentRange, rank: int = 0, num_ranks: int = 1) -> None:
    message = UpdateDone(update_id, 77, 1, rank, num_ranks, True, 20)
    bench.send(f"learner-{rank}", message, (b"results", *pack_ranges(ranges)))


def _in_flight(bench: Bench) -> list[int]:
    return bench.core.status()["updates_in_flight"]


# ------------------------------------------------------------------ plans of another broker


def test_ranks_may_come_before_the_driver():
    bench = Bench(recovery_grace_s=0.0)
    _join(bench, training={0: _range(0)})
    assert _in_flight(bench) == [0]
    bench.driver()
    bench.open(0, batch=20)
    _done(bench, 0, _range(0))
    assert [report.update_id for report in bench.sent("driver", UpdateReport)] == [0]


def test_a_result_of_another_plan_replaces_one_that_nobody_was_told_to_train():
    bench = Bench(recovery_grace_s=0.0)
    bench.ready_run(batch=20, staleness=1)
    bench.runner()
    bench.fragment(steps=20)
    assert bench.sent("learner-0", ShardPlan)
    _done(bench, 0, _range(5))
    assert [report.update_id for report in bench.sent("driver", UpdateReport)] == [0]
    assert bench.state.ledger.accounting.counts() == {"sampled": 40, "trained": 20, "pending": 20}
    assert bench.state.ledger.free_steps() == 20, "what that plan had taken is free again"


def test_a_result_of_another_plan_does_not_replace_one_that_is_being_trained():
    bench = bench_with_runner(batch=20, steps=20)
    plan = bench.make_ready()
    _done(bench, 0, _range(5))
    assert bench.sent("driver", UpdateReport) == []
    bench.done(plan)
    assert bench.sent("driver", UpdateReport)


def test_a_plan_that_holds_what_turns_out_to_be_trained_is_made_again():
    bench = Bench()
    bench.driver(next_update=1)
    _join(bench, next_update=1)
    bench.weights(1)
    bench.open(1, batch=20)
    bench.runner()
    bench.fragment(steps=20, version=1)
    assert _in_flight(bench) == [1]
    _done(bench, 0, _range(0))  # the answer to an earlier broker
    assert _in_flight(bench) == []
    assert bench.state.ledger.accounting.pending == 0
    bench.fragment(steps=20, version=1)
    assert [plan.update_id for plan in bench.sent("learner-0", ShardPlan)] == [1]


# ------------------------------------------------------------------ ranks that are not equally far


# ------------------------------------------------------------------ deaths


def test_of_another_brokers_plan_everything_that_is_here_is_blamed():
    bench = Bench(death_limit=1)
    bench.driver()
    bench.open(0, batch=40)
    bench.runner()
    bench.fragment(steps=20, seq=1)
    payload = (*pack_ranges([]), *pack_ranges([_range(0), _range(1)]))
    place = {"rank": 0, "num_ranks": 1, "training_updates": (0,), "training_attempts": (77,)}
    bench.hello("learner-0", "learner", payload, generation=1, **place)
    _join(bench, generation=2, uuid="another")
    assert [item.fragment.seq for item in bench.out if isinstance(item, Quarantine)] == [1], "0 is not here"
    (runner,) = bench.core.status()["runners"]
    assert runner["num_bad"] == 1
