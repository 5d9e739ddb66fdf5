"""A broker that was restarted believes what learners, runners and the driver say."""

from __future__ import annotations

from core_fakes import Bench

from rlzmq.protocol.broker.updates import Recovery
from rlzmq.protocol.events import Tick
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges
from rlzmq.wire.messages import (
    ShardPlan,
    ShardReady,
    Train,
    UpdateReport,
)
from rlzmq.wire.schema import FragmentId


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
    from rlzmq.wire.messages import UpdateDone

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


def test_a_new_broker_waits_for_no_data_of_a_runner_that_has_been_replaced():
    bench = Bench(recovery_grace_s=2.0)
    bench.driver()
    bench.open(0, batch=20)
    bench.learner(next_update=1)
    fragments = [FragmentId(f"uuid-{name}", 1, 0) for name in ("runner-0", "runner-1")]
    ranges = pack_ranges([FragmentRange(fragment, 0, 10) for fragment in fragments])
    from rlzmq.wire.messages import UpdateDone

    bench.send("learner-0", UpdateDone(0, 77, 1, 0, 1, True, 1), (b"r", *ranges))
    bench.runner("runner-0", uuid="another", incarnation=2, replaces="uuid-runner-0")
    assert bench.sent("driver", UpdateReport) == [], "the other runner is alive"
    bench.runner("runner-1", replaces="uuid-runner-2")
    bench.fragment(runner="runner-1", steps=10)
    (report,) = bench.sent("driver", UpdateReport)
    assert report.accounting == {"sampled": 20, "trained": 20, "pending": 0}
    bench.runner("impostor", incarnation=1, replaces="uuid-runner-1")
    assert "uuid-runner-1" in bench.state.runners, "who is registered is not replaced by another name"


def test_an_update_that_is_kept_keeps_its_part_of_a_fragment():
    bench = Bench()
    bench.ready_run(batch=10, staleness=1, max_policy_lag=1)
    bench.open(1, batch=10, staleness=1, max_policy_lag=1)
    bench.runner()
    bench.fragment(steps=20)
    assert list(bench.state.runs) == [0, 1]
    assert bench.state.ledger.free_steps() == 0
    Recovery(bench.state).release(1)
    assert list(bench.state.runs) == [0]
    assert bench.state.ledger.free_steps() == 10
