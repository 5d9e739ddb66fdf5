"""Items of a batch: attributes are created when they are read, and whatever is changed is noticed."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

from rlzmq import EpisodeBatch
from rlzmq.episodes.batch_items import _PARTS, SharedColumns
from rlzmq.episodes.columns import Columns


def batch_of(num: int = 3, length: int = 4) -> EpisodeBatch:
    slots = num * (length + 1)
    return EpisodeBatch(
        {
            Columns.OBS: np.arange(slots, dtype=np.float32),
            Columns.ACTIONS: np.arange(slots),
            Columns.REWARDS: np.ones(slots, np.float32),
            Columns.STATE_OUT: {"h": np.arange(slots * 2, dtype=np.float32).reshape(slots, 2)},
        },
        start=np.arange(num) * (length + 1),
        length=np.full(num, length),
        episode_ids=[f"e{i}" for i in range(num)],
        initial_state={"h": np.zeros((num, 2), np.float32)},
        infos={1: {"k": 1}},
        custom_data={0: {"mine": [1]}},
    )


def test_lengths_ids_and_flags_create_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    created = []
    create = SharedColumns.create
    monkeypatch.setattr(
        SharedColumns,
        "create",
        lambda self, episode, name: (created.append(name), create(self, episode, name))[1],
    )
    batch = batch_of()
    facts = [(e.id_, len(e), e.t, e.is_done, e.env_steps(), e.agent_id) for e in batch]
    assert facts == [(f"e{i}", 4, 4, False, 4, None) for i in range(3)]
    assert batch.updated() is batch
    assert created == []
    assert [e.get_return() for e in batch] == [4.0] * 3
    assert created == ["rewards"] * 3
    assert all(e.rewards is e.rewards for e in batch)
    assert created == ["rewards"] * 3


@pytest.mark.parametrize("name", _PARTS)
def test_an_attribute_can_be_set_before_it_is_read(name: str) -> None:
    batch, other = batch_of(), batch_of()
    value = copy.deepcopy(getattr(other[1], name))
    if name == "custom_data":
        value = {"mine": [2]}
    setattr(batch[0], name, value)
    assert getattr(batch[0], name) is value
    assert batch.updated() is not batch or name == "infos"


@pytest.mark.parametrize("name", _PARTS)
def test_reading_an_attribute_changes_nothing(name: str) -> None:
    batch = batch_of()
    for episode in batch:
        getattr(episode, name)
    assert batch.updated() is batch


def test_an_item_keeps_the_columns_but_not_the_batch_alive() -> None:
    class Rewards(np.ndarray):
        """An array that weak references can watch."""

    batch = batch_of()
    rewards = np.ones(15, np.float32).view(Rewards)
    batch.columns[Columns.REWARDS], watched = rewards, weakref.ref(rewards)
    del rewards
    item = list(batch)[1]
    gc.disable()
    try:
        del batch
        np.testing.assert_array_equal(item.get_observations(), np.arange(5, 10, dtype=np.float32))
        assert (item.get_return(), item.initial_state["h"].shape) == (4, (2,))
        assert watched() is not None
        del item
        assert watched() is None, "a cycle keeps columns alive until a collection"
    finally:
        gc.enable()


def test_an_unread_item_is_copied_and_pickled_whole() -> None:
    item = batch_of()[0]
    for twin in (copy.deepcopy(item), copy.copy(batch_of()[0]), pickle.loads(pickle.dumps(batch_of()[0]))):
        assert twin.id_ == "e0"
        assert twin.custom_data == {"mine": [1]}
        assert twin.get_infos() == [{}, {"k": 1}, {}, {}, {}]
        np.testing.assert_array_equal(twin.get_observations(), item.get_observations())
        twin.add_env_step(
            9.0, 1, 1.0, extra_model_outputs={Columns.STATE_OUT: {"h": np.zeros(2, np.float32)}}
        )
        assert len(twin) == 5
