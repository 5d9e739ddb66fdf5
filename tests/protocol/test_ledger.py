"""The ledger: accepted once, trained once, every step accounted for (a state machine proves it)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlzmq.protocol.broker.updates import rank_shares, take_shards
from rlzmq.protocol.ledger import DROP_REASONS, Ledger, RunnerRecord, StepAccount
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import FragmentRange


def _id(seq: int, runner: str = "r", incarnation: int = 1) -> FragmentId:
    return FragmentId(runner, incarnation, seq)


def _ledger(*sizes: int) -> Ledger:
    ledger = Ledger()
    for seq, size in enumerate(sizes):
        ledger.accept(_id(seq), size, generation=0, version=0)
    return ledger


def test_of_what_is_disowned_only_what_was_not_trained_here_is_taken_off_the_account():
    ledger = _ledger(5)
    ledger.commit([ledger.take(ledger.entries[_id(0)], 2)])
    ledger.disown_below([_id(1)])
    assert ledger.accounting.counts() == {"sampled": 2, "trained": 2, "pending": 0}


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


def test_what_learners_trained_under_an_earlier_broker_is_not_trained_again():
    ledger = Ledger()
    ledger.note_trained([FragmentRange(_id(0), 0, 6)])
    entry = ledger.accept(_id(0), 10, generation=0, version=0)
    assert entry is not None
    assert (entry.done, entry.free) == (6, 4)
    ledger.note_trained([FragmentRange(_id(0), 0, 10)])
    assert ledger.is_committed(_id(0))
    assert ledger.accounting.counts() == {"sampled": 0, "trained": 0, "pending": 0}


def test_watermarks_advance_over_gapless_commits():
    record = RunnerRecord()
    for seq in (1, 2, 4):
        record.commit(seq)
    assert (record.watermark, record.beyond) == (0, {1, 2, 4})
    record.commit(0)
    assert (record.watermark, record.beyond) == (3, {4})
    record.commit_below(4)
    assert (record.watermark, record.beyond) == (5, set())
    record.commit_below(10)
    assert (record.watermark, record.beyond) == (10, set())
    assert record.is_committed(9)
    for seq in (12, 15):
        record.commit(seq)
    record.commit_below(14)
    assert (record.watermark, record.beyond) == (14, {15}), "what lies below the watermark is not kept twice"
    record.commit_below(11)
    assert (record.watermark, record.beyond) == (14, {15})
    assert not record.is_committed(14)


@pytest.mark.parametrize(
    ("steps", "ranks", "shares"), [(10, 2, [5, 5]), (10, 3, [4, 3, 3]), (1, 3, [1, 0, 0])]
)
def test_shares_are_as_equal_as_integers_allow(steps, ranks, shares):
    assert rank_shares(steps, ranks) == shares


class LedgerMachine(RuleBasedStateMachine):
    """Accepts, plans, commits, releases and drops in any order, against a model of single steps."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.next_seq = 0
        self.updates: list[list[FragmentRange]] = []
        self.trained: set[tuple[FragmentId, int]] = set()
        self.sizes: dict[FragmentId, int] = {}

    @rule(size=st.integers(0, 9), version=st.integers(0, 2), runner=st.sampled_from("ab"))
    def accept(self, size, version, runner):
        fragment = _id(self.next_seq, runner)
        self.next_seq += 1
        assert self.ledger.accept(fragment, size, generation=0, version=version) is not None
        self.sizes[fragment] = size

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def accept_again(self, data):
        fragment = data.draw(st.sampled_from(sorted(self.sizes)))
        assert self.ledger.accept(fragment, self.sizes[fragment], generation=0, version=0) is None

    @rule(share=st.integers(1, 8), num_ranks=st.integers(1, 3))
    def plan(self, share, num_ranks):
        if self.ledger.free_steps() >= share * num_ranks:
            shards = take_shards(self.ledger, self.ledger.free_entries(), [share] * num_ranks)
            assert [sum(item.num_steps for item in shard) for shard in shards] == [share] * num_ranks
            self.updates.append([item for shard in shards for item in shard])

    @precondition(lambda self: self.updates)
    @rule(data=st.data())
    def commit(self, data):
        ranges = self.updates.pop(0)
        is_skipped = data.draw(st.booleans())
        before = self.ledger.accounting.trained
        num_trained = self.ledger.commit(ranges, is_skipped=is_skipped)
        assert num_trained == (0 if is_skipped else sum(item.num_steps for item in ranges))
        assert self.ledger.accounting.trained - before == num_trained
        for fragment, first, num_steps in ranges:
            for step in range(first, first + num_steps):
                assert (fragment, step) not in self.trained, "trained twice"
                self.trained.add((fragment, step))

    @precondition(lambda self: self.updates)
    @rule()
    def release_the_latest(self):
        self.ledger.release(self.updates.pop())
        for ranges in self.updates:
            self.ledger.reserve(ranges)

    @precondition(lambda self: self.ledger.entries)
    @rule(data=st.data(), reason=st.sampled_from(DROP_REASONS))
    def drop(self, data, reason):
        fragment = data.draw(st.sampled_from(sorted(self.ledger.entries)))
        self.ledger.drop(self.ledger.entries[fragment], reason)

    @invariant()
    def every_step_is_accounted_for(self):
        ledger = self.ledger
        ledger.accounting.check()
        assert ledger.accounting.sampled == sum(self.sizes.values())
        assert ledger.accounting.pending == sum(e.num_steps - e.done for e in ledger.entries.values())
        assert ledger.free_steps() == sum(e.free for e in ledger.entries.values())
        in_flight = sum(item.num_steps for ranges in self.updates for item in ranges)
        assert in_flight == sum(e.taken - e.done for e in ledger.entries.values())

    @invariant()
    def what_is_not_here_is_committed(self):
        for fragment in self.sizes:
            assert (fragment in self.ledger.entries) != self.ledger.is_committed(fragment)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


# ------------------------------------------------------------------ exactly


def _version(ledger: Ledger, seq: int, steps: int, version: int, **fields) -> None:
    assert ledger.accept(_id(seq), steps, generation=3, version=version, **fields) is not None


@pytest.mark.parametrize(
    ("env_steps", "is_kept"),
    [((4, 6), True), ((0, 10), True), ((10,), True), ((4, 5), False), ((-1, 11), False), ((), False)],
)
def test_steps_of_each_env_are_kept_if_they_add_up(env_steps, is_kept):
    entry = Ledger().accept(_id(0), 10, generation=0, version=0, env_steps=env_steps)
    assert entry is not None
    assert entry.env_steps == (env_steps if is_kept else ())


def test_memory_is_counted_while_it_is_held_and_on_average_of_all_that_came():
    ledger = Ledger()
    assert ledger.mean_bytes == 0
    for seq, num_bytes in enumerate((10, 21)):
        _version(ledger, seq, 5, 0, num_bytes=num_bytes)
        assert ledger.mean_bytes == (10, 15)[seq]
    record = ledger.runner("r", 1)
    assert (ledger.num_bytes, record.uncommitted_bytes, record.num_uncommitted) == (31, 31, 2)
    ledger.commit([ledger.take(ledger.entries[_id(0)], 5)])
    assert (ledger.num_bytes, record.uncommitted_bytes, record.num_uncommitted) == (21, 21, 1)
    ledger.drop(ledger.entries[_id(1)], "stale")
    assert (ledger.num_bytes, record.uncommitted_bytes, record.num_uncommitted) == (0, 0, 0)
    assert ledger.mean_bytes == 15


def test_free_steps_are_those_of_versions_within_both_bounds():
    ledger = Ledger()
    for seq, version in enumerate((3, 4, 5, 4)):
        _version(ledger, seq, 10**seq, version)
    assert ledger.free_steps() == 1111
    assert ledger.free_steps(4) == 1110
    assert ledger.free_steps(4, 4) == 1010
    assert ledger.free_steps(max_version=3) == 1
    assert ledger.free_steps(max_version=4) == 1011
    ledger.take(ledger.entries[_id(1)], 4)
    assert ledger.free_steps(4, 4) == 1006
    ledger.drop(ledger.entries[_id(1)], "stale")
    assert ledger.free_steps(4, 4) == 1000
    assert [entry.id.seq for entry in ledger.free_entries()] == [0, 2, 3]


def test_what_the_driver_has_accounted_for_is_disowned_and_no_more():
    ledger = Ledger()
    for fragment in (_id(0), _id(1), _id(0, "other"), _id(0, incarnation=2)):
        ledger.accept(fragment, 5, generation=0, version=0)
    ledger.disown_below([_id(1)])
    assert sorted(ledger.entries) == [_id(0, "other"), _id(1), _id(0, incarnation=2)]
    assert ledger.accounting.counts() == {"sampled": 15, "trained": 0, "pending": 15}
    assert ledger.runner("r", 1).watermark == 1
    assert ledger.accept(_id(0), 5, generation=0, version=0) is None
    ledger.disown_below([_id(3, incarnation=2)])
    assert ledger.runner("r", 2).watermark == 3, "fragments that did not come count, too"


def test_watermarks_are_told_when_they_move_and_again_when_reports_were_given_up():
    ledger = _ledger(5, 5)
    ledger.runner("idle", 1)
    assert ledger.take_watermarks() == []
    ledger.commit([ledger.take(ledger.entries[_id(0)], 5)])
    assert ledger.take_watermarks() == [FragmentRange(_id(1), 0, 0)]
    assert ledger.take_watermarks() == []
    ledger.tell_again()
    assert ledger.take_watermarks() == [FragmentRange(_id(1), 0, 0)]
    ledger.drop(ledger.entries[_id(1)], "stale")
    ledger.forget("idle", 1)
    ledger.forget("r", 1)
    assert ledger.take_watermarks() == [FragmentRange(_id(0), 0, 1)], "of whom the driver had heard"
    assert ledger.take_watermarks() == []


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
