"""Values of actor calls: every supported type comes back as it was, the rest is refused by name."""

from __future__ import annotations

import tracemalloc

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.wire.codec import WireError, decode, encode
from rlzmq.wire.values import pack_blob, pack_value, unpack_blob, unpack_value


def _round_trip(value):
    frames = [
        bytes(memoryview(frame).cast("B")) if memoryview(frame).nbytes else b""
        for frame in encode(1, {}, pack_value(value))
    ]
    return unpack_value(decode(frames).arrays)


_keys = (
    st.text(max_size=5)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.tuples(st.integers(), st.text(max_size=3))
)
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def _same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


@given(_values)
def test_plain_values_come_back_with_their_types(value):
    assert _same(_round_trip(value), value)
    assert _same(unpack_blob(pack_blob(value)), value)


@pytest.mark.parametrize("size", [0, 3, 5000])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, bool, np.complex64, "<U3", "M8[s]"])
def test_arrays_and_scalars_keep_dtype_and_shape(size, dtype):
    array = np.zeros((size, 2), dtype)
    got = _round_trip({"a": array, "scalar": np.zeros((), dtype)[()]})
    assert got["a"].dtype == array.dtype
    assert got["a"].shape == array.shape
    assert got["scalar"] == np.zeros((), dtype)[()]
    assert type(got["scalar"]) is type(np.zeros((), dtype)[()])


def test_long_lists_of_numbers_and_long_bytes_travel_out_of_band():
    value = {
        "floats": [float(i) for i in range(10_000)],
        "ints": list(range(10_000)),
        "bytes": b"x" * 100_000,
    }
    arrays = pack_value(value)
    assert arrays[0].nbytes < 200
    assert _round_trip(value) == value


def test_thousands_of_small_arrays_are_one_frame():
    state = {f"p{i}": np.full(3, i, np.float32) for i in range(3000)}
    assert len(pack_value(state)) == 2
    got = _round_trip(state)
    assert all(np.array_equal(got[key], state[key]) for key in state)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(-1.0, np.array([1.0, 2.0], np.float32)),
        gym.spaces.Box(0, 255, (4, 4), np.uint8),
        gym.spaces.Discrete(5, start=2),
        gym.spaces.MultiDiscrete([2, 3]),
        gym.spaces.MultiBinary(4),
        gym.spaces.MultiBinary([2, 3]),
        gym.spaces.Text(5, charset="ab"),
        gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Discrete(3)]),
        gym.spaces.Dict({"b": gym.spaces.Discrete(2), "a": gym.spaces.Dict({"c": gym.spaces.Box(0, 1)})}),
        gym.spaces.Sequence(gym.spaces.Discrete(3), stack=True),
        gym.spaces.Graph(gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(3)),
        gym.spaces.OneOf([gym.spaces.Discrete(2), gym.spaces.Box(0, 1)]),
    ],
)
def test_spaces_come_back_equal(space):
    got = _round_trip([space])[0]
    assert got == space
    assert type(got) is type(space)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {2}]}, r"value\['a'\]\[1\]: a builtins.set does not travel. Send a sorted list"),
        ([ValueError("x")], r"value\[0\].*Raise it instead"),
        ((lambda: 1,), r"value\[0\].*Functions and classes stay"),
        ({"o": object()}, r"value\['o'\].*get_state"),
        (np.array([object()]), "array of Python objects"),
        ({frozenset(): 1}, "key frozenset"),
    ],
)
def test_other_types_are_refused_with_their_path(value, words):
    with pytest.raises(TypeError, match=words):
        pack_value(value)


def test_values_that_contain_themselves_are_refused():
    value: list = []
    value.append(value)
    with pytest.raises(ValueError, match="contains itself"):
        pack_value(value)


def test_a_damaged_blob_is_refused():
    blob = pack_blob({"a": np.arange(3)})
    for damaged in (b"", blob[:-1], blob + b"x", b"\xff" * 8 + blob[8:]):
        with pytest.raises(WireError):
            unpack_blob(damaged)


_OF_BOX = {"shape": [1 << 17], "dtype": "<f8"}
_WHOLE, _ZERO = {"__array__": [0]}, {"__array__": [0, "<f8"]}


@pytest.mark.parametrize("what", ["bytes", "tensor", "floats", "array", "box", "uniform box", "pooled"])
def test_a_value_that_refers_to_one_array_again_and_again_is_refused(what):
    large = np.zeros(1 << 17, np.float64)
    nodes = {
        "bytes": {"__bytes__": [0]},
        "tensor": {"__tensor__": [0]},
        "floats": {"__numbers__": [0]},
        "array": {"__array__": [0]},
        "box": {"__space__": {"kind": "box", "low": _WHOLE, "high": _WHOLE, **_OF_BOX}},
        "uniform box": {"__space__": {"kind": "box", "low": _ZERO, "high": _ZERO, **_OF_BOX}},
        "pooled": {"__bytes__": [0, "|u1", 8000]},
    }
    tree = np.frombuffer(msgpack.packb([nodes[what]] * 2000), np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="again and again"):
            unpack_value([tree, np.zeros(8000, np.uint8), *([] if what == "pooled" else [large])])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_large_values_of_every_kind_are_within_their_bound():
    box = gym.spaces.Box(0, 255, (512, 512, 4), np.uint8)
    for value in (
        list(range(1 << 20)),
        [float(i) for i in range(1 << 20)],
        b"x" * (8 << 20),
        torch.zeros(1 << 21),
        gym.spaces.Dict({"a": gym.spaces.Tuple([box, box])}),
        [np.zeros(500) for _ in range(4000)],
    ):
        _round_trip(value)
