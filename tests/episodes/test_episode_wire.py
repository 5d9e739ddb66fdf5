"""The wire form of batches: nothing is copied or lost, and nothing that comes in is believed."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from rlzmq.core.errors import ProtocolError
from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_wire import FrameReader
from tests.episodes.test_episode_batch import assert_same_episodes, mixed_episodes, runner_batch


def sent(batch: EpisodeBatch) -> tuple[dict[str, Any], list[bytes]]:
    """Header and frames after a trip through msgpack and bytes."""
    header, frames = batch.to_wire()
    return msgpack.unpackb(msgpack.packb(header)), [frame.tobytes() for frame in frames]


def received(batch: EpisodeBatch) -> EpisodeBatch:
    spaces = {"observation_space": batch.observation_space, "action_space": batch.action_space}
    return EpisodeBatch.from_wire(*sent(batch), **spaces)


def test_round_trips_keep_every_episode() -> None:
    batch = runner_batch()
    batch.agent_ids, batch.module_ids = list(range(6)), ["m"] * 6
    for part in (batch, batch[1:4], batch.split(7)[1], batch.select([3, 0]), batch[:0]):
        twin = received(part)
        assert_same_episodes(twin, part)
        assert twin.meta == part.meta
        assert twin.env_index.tolist() == part.env_index.tolist()
        assert twin.duration_s.tolist() == part.duration_s.tolist()
    from_lists = EpisodeBatch.from_episodes(mixed_episodes())
    assert_same_episodes(received(from_lists), from_lists)
    assert len(received(EpisodeBatch.from_episodes([]))) == 0


def test_frames_are_the_columns_own_memory_and_columns_are_the_frames_own_memory() -> None:
    batch = runner_batch()
    header, frames = batch.to_wire()
    for leaf in tree_leaves(batch.columns):
        assert any(np.shares_memory(leaf, frame) for frame in frames)
    twin = EpisodeBatch.from_wire(header, frames)
    for leaf in tree_leaves(twin.columns):
        assert any(np.shares_memory(leaf, frame) for frame in frames)


def test_a_small_part_of_large_columns_is_sent_without_the_rest() -> None:
    columns = {name: np.zeros(1000) for name in ("obs", "actions", "rewards")}
    batch = EpisodeBatch(columns, start=[0, 900, 950], length=[3, 20, 10])
    assert batch[1:].to_wire()[0]["num_slots"] == 61
    assert batch[:2].to_wire()[0]["num_slots"] == 25
    twice = batch.select([1, 1])
    assert twice.to_wire()[0]["num_slots"] == 42
    assert len(received(twice)) == 2


def test_infos_without_a_plain_form_are_left_out_and_counted() -> None:
    batch = runner_batch()
    batch.infos[3] = {"a": np.float32(1), "b": object(), "c": np.arange(2), "d": (1, "x", None)}
    batch.custom_data[2] = {"f": print, "g": 1}
    twin = received(batch)
    assert twin.meta == {"runner": "r", "num_infos_left_out": 2}
    assert batch.meta == {"runner": "r"}
    assert list(twin.infos[3]) == ["a", "c", "d"]
    assert type(twin.infos[3]["a"]) is np.float32
    assert twin.infos[3]["c"].tolist() == [0, 1]
    assert twin.infos[3]["d"] == (1, "x", None)
    assert twin.custom_data == {1: {"mine": 4}, 2: {"g": 1}}


def test_every_dtype_of_columns_comes_through() -> None:
    values: list[Any] = [
        np.array([True, False]),
        np.array([1, 2], np.uint8),
        np.array([1, 2], ">i4"),
        np.array([1, 2], np.float16),
        np.array([1j, 2]),
        np.array(["2020-01-01", "NaT"], "M8[s]"),
        np.array([1, 2], "m8[ms]"),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.zeros((2, 0)),
        np.zeros((2, 3, 1))[:, ::-1],
    ]
    for value in values:
        columns = {"obs": value, "actions": (value,), "rewards": np.zeros(2), "x": {"b": value, "a": {}}}
        twin = received(EpisodeBatch(columns, start=[0], length=[1]))
        for leaf in tree_leaves({key: twin.columns[key] for key in ("obs", "actions", "x")}):
            assert leaf.dtype == value.dtype
            assert np.array_equal(leaf, value, equal_nan=value.dtype.kind in "fcmM")


def test_what_can_t_be_sent_is_refused_by_the_sender() -> None:
    deep: Any = np.zeros(2)
    for _ in range(20):
        deep = (deep,)
    for value, expected in (
        (np.array([None, 1]), "column 'x': expected the dtype of a bool, number"),
        ({1: np.zeros(2)}, "column 'x': expected keys of type str"),
        (deep, "column 'x': expected trees nested at most 16"),
        ({str(i): np.zeros(2) for i in range(1100)}, "at most 1024 arrays"),
    ):
        columns = {name: np.zeros(2) for name in ("obs", "actions", "rewards")}
        with pytest.raises(ValueError, match=expected):
            EpisodeBatch({**columns, "x": value}, start=[0], length=[1]).to_wire()


def test_frames_at_odd_addresses_are_copied_to_even_ones() -> None:
    header, frames = sent(runner_batch())
    shifted = [memoryview(b"\x00" + frame)[1:] for frame in frames]
    twin = EpisodeBatch.from_wire(header, shifted)
    assert all(leaf.flags.aligned for leaf in tree_leaves(twin.columns))
    assert twin.get_returns().tolist() == runner_batch().get_returns().tolist()


def set_in(header: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    target: Any = header
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("num_slots",), 34),
        (("num_slots",), True),
        (("num_chunks",), 2**60),
        (("extra",), 1),
        (("columns",), []),
        (("columns", 0, 0), "actions"),
        (("columns", 1, 1), ["|O", []]),
        (("columns", 1, 1), ["<i8", [2**60, 2**60]]),
        (("columns", 1, 1), ["<i8", [1] * 40]),
        (("columns", 1, 1), {"dict": [["a", ["<i8", []]], ["a", ["<i8", []]]]}),
        (("columns", 2, 1), {"tuple": [["<f8", []]]}),
    ],
)  # fmt: skip
def test_malformed_headers_are_refused(path: tuple[Any, ...], value: Any) -> None:
    header, frames = sent(runner_batch())
    set_in(header, path, value)
    with pytest.raises(ProtocolError, match="expected"):
        EpisodeBatch.from_wire(header, frames)


@pytest.mark.parametrize(
    ("row", "value", "expected"),
    [
        (0, -1, "counts within 0…33"), (0, 33, "slots within 0…32"), (0, 2**62, "counts within"),
        (1, -1, "counts within"), (1, 31, "slots within"), (1, 2**63 - 1, "counts within"),
        (2, 3, "slots within"), (2, -5, "counts within"), (3, -1, "t_started"), (3, 2**62, "t_started"),
        (4, 4, "flags"), (4, -1, "flags"), (5, -2, "env index"),
        (6, int(np.float64("nan").view(np.int64)), "duration"),
        (6, int(np.float64(-1).view(np.int64)), "duration"),
    ],
)  # fmt: skip
def test_chunks_outside_of_the_columns_are_refused(row: int, value: int, expected: str) -> None:
    header, frames = sent(runner_batch())
    table = np.frombuffer(frames[0], np.int64).reshape(7, 6).copy()
    table[row, 0] = value
    frames[0] = table.tobytes()
    with pytest.raises(ProtocolError, match=f"expected .*{expected}.*, got start"):
        EpisodeBatch.from_wire(header, frames)


def test_chunks_that_overlap_without_end_are_refused() -> None:
    """Otherwise a small message could make the receiver gather any amount of steps."""
    header, frames = sent(runner_batch())
    for row in (0, 2):
        table = np.frombuffer(frames[0], np.int64).reshape(7, 6).copy()
        table[:3] = 0
        table[1 if row == 0 else 2] = 30
        table[0] = 30 if row else 0
        with pytest.raises(ProtocolError, match="at most 33 steps and 66 slots"):
            EpisodeBatch.from_wire(header, [table.tobytes(), *frames[1:]])


def test_wrong_numbers_and_kinds_of_frames_are_refused() -> None:
    header, frames = sent(runner_batch())
    for wrong, expected in (
        (frames[:-1], "expected another frame, got only"),
        ([*frames, b""], f"expected {len(frames)} frames, got {len(frames) + 1}"),
        ([b""] * 1025, "at most 1024 frames"),
        ([None, *frames[1:]], "expected contiguous bytes, got NoneType"),
        ([frames[0][:-1], *frames[1:]], "chunk table: expected 336 bytes"),
        ([*frames[:2], frames[2] + b"x", *frames[3:]], "column 'obs'.*expected"),
    ):
        with pytest.raises(ProtocolError, match=expected):
            EpisodeBatch.from_wire(header, wrong)
    with pytest.raises(ProtocolError, match="contiguous"):
        FrameReader([np.zeros((4, 4))[:, ::2]]).buffer("x")
    with pytest.raises(ProtocolError, match="bools of 0 or 1, got 7"):
        FrameReader([b"\x01\x07"]).array(np.dtype(bool), (2,), "x")


def test_malformed_texts_are_refused() -> None:
    header, frames = sent(runner_batch())
    text = msgpack.unpackb(frames[1])
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    for changes, expected in (
        ({"episode_ids": ["x"]}, "episode_ids: expected 6, got 1"),
        ({"infos": [[33, {}]]}, "infos: expected a dict at a place within 0…32, got dict at 33"),
        ({"infos": [[0, {"x": nested}]]}, "infos: expected values nested"),
        ({"infos": [[0, {"__eval__": "1"}]]}, "infos: expected a known tag"),
        ({"custom_data": [[6, {}]]}, "custom_data: expected a dict at a place within 0…5"),
        ({"more": 1}, "text: expected the fields"),
    ):
        changed = msgpack.packb({**text, **changes})
        with pytest.raises(ProtocolError, match=expected):
            EpisodeBatch.from_wire(header, [frames[0], changed, *frames[2:]])
    for data in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", frames[1][:-3], frames[1] + b"\x00", b"\x93" * 3000):
        with pytest.raises(ProtocolError, match="text: expected"):
            EpisodeBatch.from_wire(header, [frames[0], data, *frames[2:]])
