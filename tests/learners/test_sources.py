"""What learners train on: every fresh batch once, or the newest ones several times."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rlzmq.learners.sources import CircularBuffer, FreshBatch


def train(source: CircularBuffer, batch: int, seed: int = 0) -> list[int]:
    source.add(batch)
    return list(source.batches(source.num_batches, np.random.default_rng([seed, batch])))


def test_a_fresh_batch_is_trained_once() -> None:
    source = FreshBatch()
    source.add("batch")
    assert source.num_batches == 1
    assert list(source.batches(1, np.random.default_rng(0))) == ["batch"]
    assert not source.repeats


@pytest.mark.parametrize(("num_batches", "iterations"), [(8, 2), (4, 3), (1, 2), (3, 1)])
def test_a_circular_buffer_trains_the_newest_batches_up_to_k_times(num_batches: int, iterations: int) -> None:
    source = CircularBuffer(num_batches, iterations)
    uses: Counter[int] = Counter()
    num_trained = []
    for update in range(400):
        drawn = train(source, update)
        assert 1 <= len(drawn) <= iterations
        assert all(update - num_batches < batch <= update for batch in drawn)
        uses.update(drawn)
        num_trained.append(len(drawn))
    assert max(uses.values()) <= iterations
    # Once there is a store, nearly every use is made.
    assert np.mean(num_trained[num_batches * 4 :]) > 0.85 * iterations
    assert source.num_uses_left == pytest.approx(num_batches * (iterations - 1) / 2, abs=iterations)


def test_a_circular_buffer_draws_from_all_that_it_holds() -> None:
    source = CircularBuffer(8, 2)
    ages: Counter[int] = Counter()
    for update in range(2000):
        ages.update(update - batch for batch in train(source, update))
    assert set(ages) == set(range(8))
    assert ages[0] < sum(ages.values()) / 2


def test_draws_follow_from_the_seed() -> None:
    first, second = CircularBuffer(8, 2), CircularBuffer(8, 2)
    assert [train(first, u) for u in range(50)] == [train(second, u) for u in range(50)]


def test_a_rollback_undoes_what_a_failed_update_took() -> None:
    source = CircularBuffer(4, 2)
    for update in range(10):
        train(source, update)
    before, checkpoint = source.num_uses_left, source.checkpoint()
    drawn = train(source, 10)
    source.rollback(checkpoint)
    assert source.num_uses_left == before
    assert train(source, 10) == drawn
