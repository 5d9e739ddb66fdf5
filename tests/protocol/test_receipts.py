"""What runners hear of their fragments: accepted at once, forgettable once the driver has the report."""

from __future__ import annotations

import pytest
from core_fakes import bench_with_runner

from rlzmq.protocol.broker.state import Receipts
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import to_spans
from rlzmq.wire.messages import Committed, DriverState, Goodbye, Welcome


def test_each_acceptance_is_told_once():
    receipts = Receipts()
    for seq in (2, 0, 1):
        receipts.accept("b", seq)
    receipts.accept("a", 7)
    assert receipts.runners_to_tell() == ["b", "a"]
    assert receipts.take_accepted("b") == to_spans([0, 1, 2])
    assert receipts.take_accepted("b") == to_spans([])
    assert receipts.runners_to_tell() == ["a"]


def test_a_runner_that_left_is_told_nothing_but_may_still_forget():
    receipts = Receipts()
    receipts.accept("a", 0)
    receipts.let_go(FragmentId("a", 1, 0))
    receipts.forget_peer("a")
    assert receipts.runners_to_tell() == []
    assert receipts.may_forget("a", 1).watermark == 1


def test_news_come_once_and_in_a_fixed_order():
    receipts = Receipts()
    receipts.let_go(FragmentId("b", 1, 1))
    receipts.let_go_below(FragmentId("a", 2, 5))
    receipts.may_forget("c", 1).commit(0)  # it is told of that with something else
    assert receipts.take_news() == [("a", 2), ("b", 1)]
    assert receipts.take_news() == []
    assert (receipts.may_forget("b", 1).watermark, receipts.may_forget("b", 1).beyond) == (0, {1})
    assert receipts.may_forget("a", 2).watermark == 5


def test_incarnations_are_apart_and_one_that_is_gone_for_good_leaves_nothing():
    receipts = Receipts()
    receipts.let_go(FragmentId("a", 1, 0))
    receipts.let_go(FragmentId("a", 2, 0))
    receipts.forget_record("a", 1)
    assert not receipts.may_forget("a", 1).is_committed(0)
    assert receipts.may_forget("a", 2).is_committed(0)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_report_lets_go_of_fragments_also_of_a_runner_that_has_left(is_away):
    bench = bench_with_runner(batch=20)
    bench.fragment(bench.leases()[0].lease_id, steps=20)
    bench.done(bench.make_ready())
    if is_away:
        bench.send("runner", Goodbye("leaving"))
    bench.send("driver", DriverState(-1, 1))
    assert bench.sent("runner", Committed) == ([] if is_away else [Committed(1, 1, ())])
    bench.runner()
    assert bench.sent("runner", Welcome)
