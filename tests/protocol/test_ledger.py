"""The ledger: what is counted once, kept and free; leases: sizes and turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.core.update_plan import plan_lease
from rlzmq.protocol.ledger import LeaseBook, Ledger
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import FragmentRange


def _id(seq: int, runner: str = "r", incarnation: int = 1) -> FragmentId:
    return FragmentId(runner, incarnation, seq)


@pytest.mark.parametrize("was_sent_again", [True, False])
def test_what_was_skipped_under_an_earlier_broker_is_counted_here_once(was_sent_again: bool) -> None:
    ledger = Ledger()
    if was_sent_again:
        ledger.accept(_id(0), 5, generation=0, version=0)
    whole = FragmentRange(_id(0), 0, 5)
    assert ledger.commit([whole], is_skipped=True) == 0
    ledger.accept(_id(0), 5, generation=0, version=0)
    account = ledger.accounting
    assert (account.sampled, account.trained, account.dropped, account.pending) == (5, 0, {"skipped": 5}, 0)


def test_fragments_refused_at_the_door_are_counted_once():
    ledger = Ledger()
    assert ledger.refuse(_id(0), 7, "fenced")
    assert not ledger.refuse(_id(0), 7, "fenced")
    assert ledger.accept(_id(0), 7, generation=0, version=0) is None
    assert ledger.accounting.dropped == {"fenced": 7}
    assert ledger.accounting.num_duplicates == 2


@pytest.mark.parametrize(
    ("env_steps", "is_kept"),
    [((4, 6), True), ((0, 10), True), ((10,), True), ((4, 5), False), ((-1, 11), False), ((), False)],
)
def test_steps_of_each_env_are_kept_if_they_add_up(env_steps, is_kept):
    entry = Ledger().accept(_id(0), 10, generation=0, version=0, env_steps=env_steps)
    assert entry is not None
    assert entry.env_steps == (env_steps if is_kept else ())


_sizes = {
    "num_runners": st.integers(1, 20),
    "num_envs": st.integers(1, 64),
    "fragment_length": st.integers(1, 200),
}


@given(remaining=st.integers(-10, 100_000), more=st.integers(0, 1000), **_sizes)
def test_a_lease_covers_something_but_not_more_than_the_rest(
    remaining, more, num_runners, num_envs, fragment_length
):
    lease = plan_lease(remaining, num_runners, num_envs, fragment_length)
    assert 0 <= lease <= fragment_length
    assert (lease > 0) == (remaining > 0)
    assert (lease - 1) * num_envs < max(remaining, 1)
    assert plan_lease(remaining + more, num_runners, num_envs, fragment_length) >= lease


def test_turns_go_to_whoever_waited_longest():
    book = LeaseBook()
    for peer in ("b", "a", "c"):
        book.grant(peer, 0, 1, 1, now=0.0, timeout_s=1.0)
    book.end(book.of_peer("c")[0].lease_id)
    peers = ["a", "b", "c", "new-2", "new-1"]
    assert sorted(peers, key=book.turn_of) == ["new-1", "new-2", "c", "b", "a"]
