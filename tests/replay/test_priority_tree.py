"""PriorityTree against plain arrays."""

from __future__ import annotations

import numpy as np
import pytest

from rlzmq.replay.step_store import PriorityTree

SIZE = 3000


@pytest.mark.parametrize("num", [1, 7, 2000])
def test_any_number_of_changes_gives_the_tree_of_the_final_priorities(num: int) -> None:
    rng = np.random.default_rng(num)
    tree, priorities = PriorityTree(SIZE), np.zeros(SIZE)
    for _ in range(20):
        indices = rng.integers(SIZE, size=num)  # some of them twice
        values = rng.random(num) * (rng.random(num) < 0.8)
        tree.set(indices, values)
        for index, value in zip(indices, values, strict=True):
            priorities[index] = value
        assert np.array_equal(tree.get(np.arange(SIZE)), priorities)
        whole = PriorityTree(SIZE)
        whole.set(np.arange(SIZE), priorities)
        assert tree.total == whole.total
        assert tree.total == pytest.approx(priorities.sum())
    drawn = tree.draw(1000, rng)
    assert np.all(priorities[drawn] > 0.0)


@pytest.mark.parametrize("size", [1, 5, 1024, 5000])
def test_only_indices_with_priorities_are_drawn_and_as_often_as_they_should(size: int) -> None:
    rng = np.random.default_rng(size)
    priorities = 10.0 ** rng.uniform(-9, 3, size) * (rng.random(size) < 0.3)
    priorities[-1] = priorities.max() or 1.0
    tree = PriorityTree(size)
    tree.set(np.arange(size), priorities)
    drawn = np.bincount(tree.draw(200_000, rng), minlength=size)
    assert not drawn[priorities == 0.0].any()
    expected = 200_000 * priorities / priorities.sum()
    assert (np.abs(drawn - expected) < 6.0 * np.sqrt(expected) + 3.0).all()


def test_draws_are_stratified() -> None:
    tree = PriorityTree(64)
    tree.set(np.arange(64), 1.0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert np.array_equal(tree.draw(64, rng), np.arange(64))
        assert np.bincount(tree.draw(32, rng) // 2).tolist() == [1] * 32
