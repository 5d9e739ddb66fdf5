"""The account's identity: every change is checked, and a wrong one is noticed at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlzmq.protocol.ledger import StepAccount


def _account() -> StepAccount:
    account = StepAccount()
    account.accept(10)
    account.train(4)
    account.drop(3, "stale")
    return account


def test_each_step_is_in_one_place() -> None:
    account = _account()
    account.refuse(2, "fenced")
    account.recover(5)
    account.disown(1)
    account.add_base(7, {"stale": 1, "surplus": 2})
    assert account.counts() == {"sampled": 10 + 2 + 5 - 1 + 10, "trained": 4 + 5 + 7, "pending": 2}
    assert account.dropped == {"stale": 4, "fenced": 2, "surplus": 2}


@pytest.mark.parametrize(
    "change",
    [
        lambda account: account.accept(-4),
        lambda account: account.train(4),
        lambda account: account.drop(4, "stale"),
        lambda account: account.disown(4),
        lambda account: account.recover(-5),
        lambda account: account.refuse(-1, "fenced"),
        lambda account: account.add_base(-5, {}),
        lambda account: account.add_base(0, {"surplus": -1}),
    ],
)
def test_what_cannot_be_is_noticed_by_the_change_that_makes_it(change: Callable[[StepAccount], None]) -> None:
    account = _account()
    with pytest.raises(AssertionError):
        change(account)


@pytest.mark.parametrize("field", ["sampled", "trained", "pending"])
def test_a_sum_that_does_not_add_up_is_noticed(field: str) -> None:
    account = _account()
    setattr(account, field, getattr(account, field) + 1)
    with pytest.raises(AssertionError):
        account.check()


def test_nothing_dropped_leaves_no_reason() -> None:
    account = _account()
    account.drop(0, "surplus")
    account.refuse(0, "fenced")
    assert account.dropped == {"stale": 3}
