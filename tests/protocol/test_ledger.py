"""The ledger: what is counted once, what is kept, what is free; schedules with faults prove the rest."""

from __future__ import annotations

import pytest

from rlzmq.protocol.ledger import Ledger
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import FragmentRange


def _id(seq: int, runner: str = "r", incarnation: int = 1) -> FragmentId:
    return FragmentId(runner, incarnation, seq)


def _ledger(*sizes: int) -> Ledger:
    ledger = Ledger()
    for seq, size in enumerate(sizes):
        ledger.accept(_id(seq), size, generation=0, version=0)
    return ledger


@pytest.mark.parametrize("was_sent_again", [True, False])
def test_what_was_skipped_under_an_earlier_broker_is_counted_here_once(was_sent_again: bool) -> None:
    ledger = _ledger(*([5] if was_sent_again else []))
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
