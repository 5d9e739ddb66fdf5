"""Values of actor calls: every supported type comes back as it was, the rest is refused by name."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import torch
from codec_fuzz import delivered

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.wire.codec import WireError, decode, encode
from rlzmq.wire.payloads import pack_blob, pack_value, unpack_blob, unpack_value


def _round_trip(value):
    return unpack_value(decode(delivered(encode(1, {}, pack_value(value)))).arrays)


def test_thousands_of_small_arrays_are_one_frame():
    state = {f"p{i}": np.full(3, i, np.float32) for i in range(3000)}
    assert len(pack_value(state)) == 2
    got = _round_trip(state)
    assert all(np.array_equal(got[key], state[key]) for key in state)


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


def test_a_damaged_blob_is_refused():
    blob = pack_blob({"a": np.arange(3)})
    for damaged in (b"", blob[:-1], blob + b"x", b"\xff" * 8 + blob[8:]):
        with pytest.raises(WireError):
            unpack_blob(damaged)


_WHOLE = {"__array__": [0]}


@pytest.mark.parametrize("what", ["bytes", "tensor", "floats", "array", "box"])
def test_a_value_that_refers_to_one_array_again_and_again_is_refused(what):
    large = np.zeros(1 << 17, np.float64)
    nodes = {
        "bytes": {"__bytes__": [0]},
        "tensor": {"__tensor__": [[0], False]},
        "floats": {"__numbers__": [0]},
        "array": {"__array__": [0]},
        "box": {"__Box__": {"low": _WHOLE, "high": _WHOLE, "shape": [1 << 17], "dtype": "<f8"}},
    }
    tree = np.frombuffer(msgpack.packb([nodes[what]] * 2000), np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="again and again"):
            unpack_value([tree, np.zeros(8000, np.uint8), large])
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


def _unpack(node: Any, pool: bytes = b"", *large: np.ndarray) -> Any:
    tree = np.frombuffer(msgpack.packb(node), np.uint8)
    return unpack_value([tree, np.frombuffer(pool, np.uint8), *large])


def _single(length: int = 2) -> SingleAgentEpisode:
    episode = SingleAgentEpisode(
        observation_space=gym.spaces.Box(-9, 9, (2,)), action_space=gym.spaces.Discrete(2)
    )
    episode.add_env_reset(np.zeros(2, np.float32))
    for t in range(length):
        episode.add_env_step(np.full(2, t, np.float32), t % 2, float(t))
    return episode


def _multi() -> MultiAgentEpisode:
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)})
    step = {agent: np.full(2, 3, np.float32) for agent in "ab"}
    episode.add_env_step(step, {"a": 0, "b": 1}, {"a": 0.5, "b": 1.5})
    return episode


# ------------------------------------------------------------------ where things lie


@pytest.mark.parametrize("odd", [2**63, -(2**63) - 1, 1.5, True, None])
def test_one_odd_number_keeps_a_list_out_of_an_array(odd):
    value = [1] * 100 + [odd]
    arrays = pack_value(value)
    assert arrays[1].nbytes == 0
    got = unpack_value(arrays)
    assert [(type(item), item) for item in got] == [(type(item), item) for item in value]


def test_nesting_up_to_a_bound_travels():
    def nested(depth: int) -> Any:
        value: Any = []
        for _ in range(depth - 1):
            value = [value]
        return value

    assert _round_trip(nested(37)) == nested(37)
    with pytest.raises(ValueError, match="nested deeper than 37"):
        pack_value(nested(38))


# ------------------------------------------------------------------ types


def test_episodes_of_every_kind_come_back():
    single, multi = _single(), _multi()
    value = {
        "one": single,
        "many": [single, _single(3)],
        "batch": EpisodeBatch.from_episodes([single]),
        "multi": multi,
        "multis": [multi, _multi()],
        "multi batch": EpisodeBatch.from_episodes([multi]),
        "mixed": [single, multi],
        "tuple": (single,),
    }
    got = _round_trip(value)
    assert {key: type(item) for key, item in got.items()} == {key: type(item) for key, item in value.items()}
    assert got["one"].id_ == got["mixed"][0].id_ == got["tuple"][0].id_ == got["batch"][0].id_ == single.id_
    assert got["multi"].id_ == got["mixed"][1].id_ == got["multi batch"][0].id_ == multi.id_
    assert [item.id_ for item in got["many"]] == [item.id_ for item in value["many"]]
    assert [item.id_ for item in got["multis"]] == [item.id_ for item in value["multis"]]
    assert got["multi"].get_return() == 2.0


def test_tensors_keep_their_kind_whatever_their_layout():
    columns = torch.arange(6.0).reshape(2, 3).T
    got = _round_trip([columns, columns.to(torch.bfloat16), torch.zeros(0, 3), torch.tensor(2.5)])
    assert torch.equal(got[0], columns)
    assert torch.equal(got[1], columns.to(torch.bfloat16))
    assert got[1].dtype is torch.bfloat16
    assert got[2].shape == (0, 3)
    assert got[3].item() == 2.5
    frozen = decode(delivered(encode(1, {}, pack_value(torch.ones(5000)))))
    unpack_value(frozen.arrays).add_(1)  # not the received memory, which cannot be written to


def test_a_class_that_is_only_called_like_a_space_or_an_episode_does_not_travel():
    for name in ("Box", "SingleAgentEpisode", "EpisodeBatch"):
        with pytest.raises(TypeError, match=f"{name} does not travel"):
            pack_value([type(name, (), {})()])


# ------------------------------------------------------------------ trees that no packer makes


@pytest.mark.parametrize(
    "node",
    [
        {"__pickle__": []},
        {"__dict__": [[[], 1]]},
        {"__int__": "1" * 4001},
        {"__metrics__": [{}, []]},
        {"__array__": [-1]},
        {"__array__": [1]},
        {"__scalar__": [0, "|u1", 2]},
        {"__numbers__": [0, "<f4", 2]},
        {"__tensor__": [[0, "<U1", 1], False]},
        {"__episodes__": [{}, [], []]},
        {"__batch__": [{}, [[]]]},
    ],
)
def test_a_tree_that_no_packer_makes_is_refused(node):
    with pytest.raises(WireError):
        _unpack(node, bytes(16), np.zeros(4, np.uint8))


_LOW, _HIGH = {"__array__": [0, "<f4"]}, {"__array__": [4, "<f4"]}
_BOX = {"low": _LOW, "high": _HIGH, "shape": [2], "dtype": "<f4"}


@pytest.mark.parametrize(
    "space",
    [
        {"__Box__": {**_BOX, "dtype": "O"}},
        {"__Box__": {**_BOX, "low": {"__array__": [0, "<f4", 3]}}},
        {"__Box__": {**_BOX, "shape": [-2]}},
        {"__Box__": {**_BOX, "shape": [2**15, 2**15]}},
        {"__Discrete__": {"n": 0, "start": 0, "dtype": "<i8"}},
        {"__Discrete__": {"n": 2, "start": 0, "dtype": "<f4"}},
        {"__MultiDiscrete__": {"nvec": "x", "start": 0, "dtype": "<i8"}},
        {"__Text__": {"max_length": 1, "min_length": 5, "charset": "ab"}},
        {"__Graph__": {"node_space": 5, "edge_space": 5}},
        {"__Dict__": {"spaces": {"a": 5}}},
        {"__Tuple__": 5},
        {"__Planet__": {}},
    ],
)
def test_a_packed_space_whose_parts_do_not_fit_is_refused(space):
    with pytest.raises(WireError):
        _unpack(space, bytes(16))
