"""Values of actor calls: where they lie in the frames, and trees that no packer makes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import torch

from rlzmq.core.metrics import ReducedMetrics
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.wire.codec import MalformedFrameError, WireError, decode, encode
from rlzmq.wire.values import pack_value, unpack_value


def _round_trip(value: Any) -> Any:
    return unpack_value(pack_value(value))


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


@pytest.mark.parametrize(("num_bytes", "num_frames"), [(4095, 2), (4096, 3)])
@pytest.mark.parametrize("make", [lambda n: np.ones(n, np.uint8), lambda n: torch.ones(n, dtype=torch.uint8)])
def test_small_arrays_share_a_frame_and_large_ones_have_their_own(make, num_bytes, num_frames):
    arrays = pack_value(make(num_bytes))
    assert len(arrays) == num_frames
    assert arrays[1].nbytes == (-(-num_bytes // 16) * 16 if num_frames == 2 else 0), "aligned to 16 bytes"


@pytest.mark.parametrize(("num_bytes", "num_frames"), [(4095, 2), (4096, 3)])
def test_short_bytes_lie_in_the_tree(num_bytes, num_frames):
    arrays = pack_value(b"x" * num_bytes)
    assert (len(arrays), arrays[1].nbytes) == (num_frames, 0)
    assert unpack_value(arrays) == b"x" * num_bytes


@pytest.mark.parametrize("number", [1, 1.5])
@pytest.mark.parametrize(("length", "pooled_bytes"), [(63, 0), (64, 512)])
def test_long_lists_of_one_kind_of_number_are_arrays(number, length, pooled_bytes):
    arrays = pack_value([number] * length)
    assert arrays[1].nbytes == pooled_bytes
    assert unpack_value(arrays) == [number] * length
    assert {type(item) for item in unpack_value(arrays)} == {type(number)}


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

    def nested_dict(depth: int) -> Any:
        value: Any = {}
        for _ in range(depth - 1):
            value = {"k": value}
        return value

    assert _round_trip(nested(37)) == nested(37)
    assert _round_trip(nested_dict(37)) == nested_dict(37)
    with pytest.raises(ValueError, match="nested deeper than 37"):
        pack_value(nested_dict(38))
    with pytest.raises(ValueError, match="nested deeper than 37"):
        pack_value(nested(38))


def test_a_tree_up_to_a_mebibyte_travels():
    longest = "x" * ((1 << 20) - 5)  # and five bytes that say how long it is
    assert _round_trip(longest) == longest
    with pytest.raises(ValueError, match="its tree is too large"):
        pack_value(longest + "x")


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


def test_what_loggers_reduce_to_comes_back():
    metrics = ReducedMetrics({"a": {"b": 1.5}}, {"a": {"b": [1.0, 2.0]}})
    got = _round_trip({"metrics": metrics})["metrics"]
    assert type(got) is ReducedMetrics
    assert (dict(got), got.states) == (dict(metrics), metrics.states)


def test_tensors_keep_their_kind_whatever_their_layout():
    columns = torch.arange(6.0).reshape(2, 3).T
    got = _round_trip([columns, columns.to(torch.bfloat16), torch.zeros(0, 3), torch.tensor(2.5)])
    assert torch.equal(got[0], columns)
    assert torch.equal(got[1], columns.to(torch.bfloat16))
    assert got[1].dtype is torch.bfloat16
    assert got[2].shape == (0, 3)
    assert got[3].item() == 2.5
    frozen = decode([bytes(memoryview(f).cast("B")) for f in encode(1, {}, pack_value(torch.ones(5000)))])
    unpack_value(frozen.arrays).add_(1)  # not the received memory, which cannot be written to


def test_a_class_that_is_only_called_like_a_space_or_an_episode_does_not_travel():
    for name in ("Box", "SingleAgentEpisode", "MultiAgentEpisode", "EpisodeBatch"):
        for value in (type(name, (), {})(), [type(name, (), {})()]):
            with pytest.raises(TypeError, match=f"{name} does not travel"):
                pack_value(value)


# ------------------------------------------------------------------ trees that no packer makes


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"__pickle__": []}, "a known tag"),
        ([{"__": []}], "a known tag"),
        ({"__tuple__": 5}, "expected a list"),
        ({"__dict__": [["key"]]}, "not enough values"),
        ({"__dict__": [[[], 1]]}, "content of '__dict__'"),
        ({"__int__": 5}, "an integer as text"),
        ({"__int__": "x"}, "invalid literal"),
        ({"__int__": "1" * 4001}, "at most 4000 digits"),
        ({"__space__": []}, "a space's plain form"),
        ({"__metrics__": [{}]}, "two dicts"),
        ({"__metrics__": [{}, {}, {}]}, "two dicts"),
        ({"__metrics__": [{}, []]}, "two dicts"),
        ({"__metrics__": {}}, "expected a list"),
        ({"__array__": []}, "an array reference is"),
        ({"__array__": 0}, "an array reference is"),
        ({"__array__": [-1]}, "an array reference is"),
        ({"__array__": [True]}, "an array reference is"),
        ({"__array__": [1]}, "array 1 is referred to, 1 came"),
        ({"__array__": [0, 5]}, "array 0: a spec is"),
        ({"__scalar__": [0, "|u1", 2]}, "without dimensions"),
        ({"__numbers__": [0, "<f4", 2]}, "1-D, got 1-D float32"),
        ({"__numbers__": [0, "<f8", 1, 1]}, "1-D, got 2-D float64"),
        ({"__tensor__": [0, "<U1", 1]}, "no torch tensor has dtype"),
        ({"__episodes__": [{}]}, "not enough values"),
        ({"__episodes__": [{}, {}]}, "a header and their arrays"),
        ({"__episodes__": [[], []]}, "a header and their arrays"),
        ({"__batch__": [[], []]}, "a header and their arrays"),
        ({"__episodes__": [{}, [], []]}, "too many values"),
        ({"__episodes__": [{}, [5]]}, "an array reference is"),
        ({"__batch__": [{}, [[]]]}, "an array reference is"),
        ({"__episode_x__": [{}, []]}, "a known tag"),
    ],
)
def test_a_tree_that_no_packer_makes_is_refused(node, says):
    with pytest.raises(WireError, match=says):
        _unpack(node, bytes(16), np.zeros(4, np.uint8))


def test_one_episode_is_one():
    header, frames = EpisodeBatch.from_episodes([_single(), _single()]).to_wire()
    node = [header, [[index] for index in range(len(frames))]]
    assert len(_unpack({"__episodes__": node}, b"", *frames)) == 2
    with pytest.raises(MalformedFrameError, match="one episode was packed, 2 came"):
        _unpack({"__episode__": node}, b"", *frames)


def test_a_value_may_unpack_to_eight_times_its_bytes_and_a_mebibyte():
    large = np.zeros(1 << 20, np.uint8)
    for num, is_good in ((9, True), (10, False)):
        node = [{"__array__": [0]}] * num
        if is_good:
            assert len(_unpack(node, b"", large)) == num
        else:
            with pytest.raises(WireError, match="at most 8 times the bytes"):
                _unpack(node, b"", large)


_ZERO, _ONE = {"__array__": [0, "<f4"]}, {"__array__": [4, "<f4"]}
_BOX = {"kind": "box", "low": _ZERO, "high": _ONE, "shape": [2], "dtype": "<f4"}


@pytest.mark.parametrize(
    "parts",
    [
        {"kind": "box"},
        {**_BOX, "dtype": "O"},
        {**_BOX, "dtype": "<U1"},
        {**_BOX, "dtype": 5},
        {**_BOX, "low": 0},
        {**_BOX, "low": {"__array__": [0, "<f4", 3]}},
        {**_BOX, "shape": 2},
        {**_BOX, "shape": [-2]},
        {**_BOX, "shape": ["2"]},
        {"kind": "discrete", "n": 0, "start": 0, "dtype": "<i8"},
        {"kind": "discrete", "n": 3, "start": 0, "dtype": "<f8"},
        {"kind": "discrete", "n": 3, "start": 0},
        {"kind": "multi_discrete", "nvec": "x", "start": 0, "dtype": "<i8"},
        {"kind": "multi_binary"},
        {"kind": "text", "max": 1},
        {"kind": "text", "max": 1, "min": 5, "charset": "ab"},
        {"kind": "dict", "spaces": 5},
        {"kind": "dict", "spaces": [5]},
        {"kind": "tuple", "spaces": 5},
        {"kind": "sequence", "space": 5, "stack": True},
        {"kind": "graph", "node": 5, "edge": 5},
        {"kind": "graph", "node": None},
        {"kind": "planet"},
        {"kind": []},
        [],
        5,
    ],
)
def test_a_packed_space_whose_parts_do_not_fit_is_refused(parts):
    with pytest.raises(MalformedFrameError, match="space"):
        _unpack({"__space__": parts}, bytes(16))


def test_only_gymnasiums_own_space_classes_travel():
    class Box(gym.spaces.Box):
        pass

    with pytest.raises(TypeError, match="Box does not travel"):
        pack_value(Box(0, 1))
