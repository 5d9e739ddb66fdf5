"""Plain values: nothing is lost, nothing but the fixed set of types is made; trees of arrays."""

from __future__ import annotations

import collections
import enum
from collections import defaultdict, namedtuple
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.core.plain import NotPlainError, checked_dtype, from_plain, to_plain
from rlzmq.core.spaces import one_hot, space_from_plain, space_to_plain
from rlzmq.core.tree import (
    is_nested,
    num_items,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_stack,
    tree_unstack,
)
from rlzmq.wire.payloads import pack_blob, unpack_blob

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("x")]),
)
_KEYS = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.sampled_from(["__tuple__", "__", "__x"]),
    st.tuples(st.integers(), st.text()),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


def through_msgpack(value: Any) -> Any:
    return from_plain(msgpack.unpackb(msgpack.packb(to_plain(value)), strict_map_key=True))


@given(_VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    for again in (through_msgpack(value), unpack_blob(pack_blob(value))):
        assert again == value
        assert type(again) is type(value)
        assert repr(again) == repr(value)


def test_arrays_come_back_with_dtype_and_shape() -> None:
    for array in (
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 3), np.float32),
        np.array(3.5),
        np.array(["a", "bc"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([True]),
        np.ones((5000, 2), np.complex64),
    ):
        for again in (through_msgpack({"x": (array,)})["x"][0], unpack_blob(pack_blob(array))):
            assert (again.dtype, again.shape) == (array.dtype, array.shape)
            assert np.array_equal(again, array)
    assert through_msgpack(np.zeros(3)).flags.writeable
    assert through_msgpack(np.ones(2, ">f8")).dtype == np.dtype(">f8")


def test_of_subclasses_only_those_of_dicts_and_arrays_are_taken() -> None:
    class Mode(enum.IntEnum):
        FAST = 1

    subs = (type("Sub", (kind,), {})(value) for kind, value in ((str, "x"), (list, [1]), (float, 0.5)))
    for write in (to_plain, pack_blob):
        for value in (Mode.FAST, namedtuple("Point", "x y")(1, 2), *subs):
            with pytest.raises(NotPlainError):
                write([value])
        write([defaultdict(list, a=[1]), np.ones(2).view(np.recarray)])


def test_what_has_no_plain_form_is_named_by_its_path() -> None:
    with pytest.raises(NotPlainError, match=r"value\['a'\]\[1\]: expected"):
        to_plain({"a": [1, object()]})
    with pytest.raises(NotPlainError, match="got dtype object"):
        to_plain(np.array([None]), "x")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotPlainError, match="nested deeper than 64, or contains itself"):
        to_plain(loop)


@pytest.mark.parametrize(
    "plain",
    [
        {"__pickle__": b""},
        {"__array__": []},
        {"__array__": ["|O", [1], b"\0" * 8]},
        {"__array__": ["<i8", [2], b"\0" * 8]},
        {"__array__": ["<i8", [2**80, 0], b""]},
        {"__array__": ["<i8", [1] * 40, b"\0" * 8]},
        {"__array__": ["|b1", [1], b"\x05"]},
        {"__scalar__": ["<i8", [1], b"\0" * 8]},
        {"__int__": "9" * 5000},
        {"__tuple__": {}},
        {"__dict__": [[[1], 2]]},
        {"__tensor__": ["x", False]},  # only files and messages have it
        msgpack.Timestamp(0),
        [set()],
    ],
)
def test_what_is_no_plain_form_is_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|not enough|invalid"):
        from_plain(plain)


def test_only_dtypes_of_numbers_datetimes_and_fixed_size_strings_pass() -> None:
    for text in ("<f4", ">i8", "|b1", "|u1", "<c16", "<U12", "|S3", "<M8[ns]", "<m8[25us]", "<M8"):
        assert checked_dtype(text) == np.dtype(text)
    for text in ("|O", "V4", "<f4,<f4", "f16", "S0", "", "x" * 99, None, 4, "{'names': []}", "i4 "):
        with pytest.raises(ValueError, match="expected"):
            checked_dtype(text)


@pytest.mark.parametrize(
    "space",
    [
        None,
        spaces.Box(-1, 1, (2, 3), np.float32),
        spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 3]), dtype=np.float64),
        spaces.Box(0, 255, (4, 4, 1), np.uint8),
        spaces.Box(0, 1, ()),
        spaces.Box(0, 1, (3,), np.bool_),
        spaces.Box(-np.inf, np.inf, (3,), np.float16),
        spaces.Discrete(5),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiDiscrete([2, 3], start=[1, -1]),
        spaces.MultiBinary(4),
        spaces.MultiBinary([2, 2]),
        spaces.Dict({"z": spaces.Discrete(2), "a": spaces.Tuple([spaces.Box(0, 1), spaces.Discrete(2)])}),
        spaces.Text(5, min_length=2, charset="abc"),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Graph(spaces.Box(0, 1, (3,)), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1)]),
    ],
)
def test_spaces_come_back_equal(space: gym.Space[Any] | None) -> None:
    in_a_file: Any = space_from_plain(msgpack.unpackb(msgpack.packb(space_to_plain(space))))
    for again in (in_a_file, unpack_blob(pack_blob(space))):
        assert again == space
        assert type(again) is type(space)
        if isinstance(space, spaces.Dict):
            assert list(again.spaces) == list(space.spaces)
        if space is not None:
            assert again.dtype == space.dtype


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
