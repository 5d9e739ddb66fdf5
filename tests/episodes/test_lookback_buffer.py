"""Lookback buffers: what every kind of index means, fillers, one-hots, setting, growing, sharing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

DATA = [10, 11, 12, 13, 14]


def plain(found: Any) -> Any:
    return np.asarray(found).tolist()


def test_array_buffers_check_shapes_and_widen_dtypes_when_written_to() -> None:
    buffer = InfiniteLookbackBuffer(np.zeros((3, 2), np.uint8))
    buffer[0] = np.array([300, 1])
    assert buffer.get(0).tolist() == [300, 1]
    buffer.append(np.array([0.5, 0.5], np.float32))
    assert buffer.get(-1).tolist() == [0.5, 0.5]
    assert buffer.get(0).tolist() == [300, 1]
    for item in (np.zeros(3), 1.0, {"a": np.zeros(2)}):
        with pytest.raises(ValueError, match="expected"):
            buffer.append(item)
        with pytest.raises(ValueError, match="expected"):
            buffer[0] = item
    assert len(buffer) == 4
    rewards = InfiniteLookbackBuffer(np.zeros(2, np.float32))
    rewards.append(1)
    rewards[:] = [1, 2, 3]
    assert rewards.data.dtype == np.float32


@pytest.mark.parametrize("bad", ["oops", None, object(), b"x"])
def test_array_buffers_refuse_items_of_another_kind(bad: Any) -> None:
    buffer = InfiniteLookbackBuffer(np.zeros(3, np.float32), 1)
    for write in (
        lambda: buffer.append(bad),
        lambda: buffer.extend([bad]),
        lambda: buffer.extend(np.array([bad])),
        lambda: buffer.set(bad, at_indices=0),
        lambda: buffer.set([bad, bad]),
        lambda: buffer.set(np.array([bad]), at_indices=[0]),
        lambda: buffer + InfiniteLookbackBuffer([1.0, bad]),
    ):
        with pytest.raises(ValueError, match=r"expected|can't be a column"):
            write()
    assert (buffer.data.dtype, buffer.data.tolist()) == (np.float32, [0, 0, 0])


def test_columns_of_strings_refuse_numbers_and_grow_with_longer_strings() -> None:
    buffer = InfiniteLookbackBuffer(["a", "b"])
    buffer.finalize()
    with pytest.raises(ValueError, match=r"expected a string .* got a number"):
        buffer.append(5)
    buffer.append("long")
    buffer[0] = "longer"
    assert buffer.data.tolist() == ["longer", "b", "long"]
    buffer.set([1, 2, 3])  # all at once
    assert buffer.data.tolist() == [1, 2, 3]
    empty = InfiniteLookbackBuffer(np.zeros(0, np.float32))
    empty.append("a")
    assert empty.data.tolist() == ["a"]


def test_nothing_written_to_a_buffer_shows_in_the_arrays_it_was_made_of_or_in_its_parts() -> None:
    column = np.arange(5)
    buffer = InfiniteLookbackBuffer(column, 1)
    buffer[0] = 100
    buffer.append(5)
    assert column.tolist() == [0, 1, 2, 3, 4]
    part = buffer._part(0, 3, 0)
    buffer[0] = 200
    assert part.data.tolist() == [0, 100, 2]
    part[0] = -1
    assert buffer.data.tolist() == [0, 200, 2, 3, 4, 5]
    whole = buffer._part(0, 6, 1)
    buffer.pop()
    buffer.append(55)
    assert whole.data.tolist() == [0, 200, 2, 3, 4, 5]
    assert buffer.data.tolist() == [0, 200, 2, 3, 4, 55]
    total = buffer + InfiniteLookbackBuffer()
    buffer[0] = 0
    assert total.get(0) == 200


def test_an_unpickled_buffer_whose_memory_is_read_only_can_be_written_to() -> None:
    frames: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(InfiniteLookbackBuffer(np.arange(3)), 5, buffer_callback=frames.append)
    buffer = pickle.loads(raw, buffers=[bytes(frame.raw()) for frame in frames])
    buffer[0] = 5
    assert buffer.data.tolist() == [5, 1, 2]


@pytest.mark.parametrize("kind", [list, np.array])
def test_growing_popping_and_adding(kind: Any) -> None:
    def make(data: list[int], lookback: int) -> InfiniteLookbackBuffer:
        return InfiniteLookbackBuffer(kind(data), lookback)

    buffer = make(DATA, 2)
    buffer.append(15)
    buffer.extend([16, 17])
    buffer.extend(np.array([18]))
    buffer.concat(make([1, 19], 1))
    assert plain(buffer.data) == [*DATA, 15, 16, 17, 18, 19]
    assert buffer.pop() == 19
    assert buffer.pop(0) == 12
    assert (buffer.pop(-8), buffer.lookback) == (10, 1)
    assert plain(buffer.data) == [11, 13, 14, 15, 16, 17, 18]
    total = buffer + make([0, 99], 1)
    assert plain(total.data) == [11, 13, 14, 15, 16, 17, 18, 99]
    assert (total.lookback, plain(total)) == (1, [13, 14, 15, 16, 17, 18, 99])
    assert plain(buffer.data) == [11, 13, 14, 15, 16, 17, 18]
    with pytest.raises(IndexError):
        buffer.pop(50)
    with pytest.raises(IndexError):
        InfiniteLookbackBuffer().pop()
