"""PriorityTree against plain arrays."""

from __future__ import annotations

import numpy as np
import pytest

from rlzmq.replay.priority_tree import PriorityTree

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
        positive = priorities[priorities > 0.0]
        assert tree.least == (positive.min() if len(positive) else np.inf)
        whole = PriorityTree(SIZE)
        whole.set(np.arange(SIZE), priorities)
        assert tree.total == whole.total
        assert tree.total == pytest.approx(priorities.sum())
    drawn = tree.draw(1000, rng)
    assert np.all(priorities[drawn] > 0.0)
