"""Trees of arrays: mapping, stacking, fillers, one-hots."""

from __future__ import annotations

import collections

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq.core.spaces import one_hot
from rlzmq.core.tree import (
    is_nested,
    num_items,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_stack,
    tree_unstack,
)

SPACE = gym.spaces.Dict(
    {
        "b": gym.spaces.Box(-1, 1, (2,), np.float32),
        "a": gym.spaces.Tuple([gym.spaces.Discrete(3, start=1), gym.spaces.MultiDiscrete([[2, 3]])]),
    }
)


def test_dicts_and_tuples_are_nodes_and_lists_are_leaves() -> None:
    tree = {"b": [1, 2], "a": (None, 3)}
    assert tree_leaves(tree) == [None, 3, [1, 2]]
    assert tree_map(repr, tree) == {"b": "[1, 2]", "a": ("None", "3")}
    assert tree_map(lambda x, y: x + y, {"a": 1}, collections.OrderedDict(a=2)) == {"a": 3}
    leaves, spec = tree_flatten(tree)
    assert spec.unflatten(leaves) == tree
    assert (tree_map(abs, -1), tree_leaves(5), is_nested((1,)), is_nested([1])) == (1, [5], True, False)
    with pytest.raises(ValueError, match="key"):
        tree_map(lambda x, y: x, {"a": 1}, {"b": 1})


@pytest.mark.parametrize(
    "tree",
    [
        {"b": 1, "a": {"y": 2, "x": None}, "c": ({"k": 3, "j": 4}, [5])},
        {2: 1, "a": 2, 1: 3, None: 4, (1, 2): 5},
        collections.OrderedDict(b=1, a={"z": 2, "y": 3}),
        {"a": {}, "b": ()},
    ],
)
def test_leaves_are_visited_in_one_order_and_dicts_keep_theirs(tree: object) -> None:
    leaves, spec = tree_flatten(tree)
    visited: list[object] = []
    mapped = tree_map(visited.append, tree)
    assert visited == tree_leaves(tree) == leaves
    assert repr(tree_map(lambda leaf: leaf, tree)) == repr(spec.unflatten(leaves)) == repr(tree)
    assert tree_leaves(mapped) == [None] * len(leaves)


def test_stacking_and_unstacking_undo_each_other() -> None:
    items = [SPACE.sample() for _ in range(3)]
    stacked = tree_stack(items)
    assert stacked["b"].shape == (3, 2)
    assert stacked["b"].dtype == np.float32
    assert stacked["a"][1].shape == (3, 1, 2)
    assert num_items(stacked) == 3
    for item, again in zip(items, tree_unstack(stacked), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(tree_leaves(item), tree_leaves(again), strict=True))
    assert tree_unstack(np.arange(2)) == [0, 1]
    assert tree_stack([1.5, 2]).dtype == np.float64
    assert tree_stack([[1, 2], [3, 4]]).shape == (2, 2)
    assert tree_stack([np.float32(1), np.float32(2)]).dtype == np.float32
    assert tree_stack([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
    assert tree_stack([np.zeros(2, np.float32), np.zeros(2)]).dtype == np.float64


def test_items_that_do_not_stack_are_named() -> None:
    with pytest.raises(ValueError, match=r"item 1 has shape \(3,\), expected \(2,\)"):
        tree_stack([np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match="item 2 has another structure"):
        tree_stack([{"a": 1}, {"a": 1}, 5])
    with pytest.raises(ValueError, match="Python objects"):
        tree_stack([np.array([None]), np.array([None])])
    with pytest.raises(ValueError, match="type set can't be a column"):
        tree_stack([{1}, {2}])
    for batch in ({"a": np.zeros(2), "b": np.zeros(1)}, np.zeros(()), {}, {"a": {}}):
        with pytest.raises(ValueError, match="expected"):
            num_items(batch)


def test_a_value_outside_of_its_space_has_no_one_hot() -> None:
    with pytest.raises(ValueError, match="expected values in 0…2"):
        one_hot(gym.spaces.Discrete(3), 3)
