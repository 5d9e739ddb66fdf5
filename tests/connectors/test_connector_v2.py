"""The base class: iterating over episodes, adding items, changing them in place, spaces."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from connector_fakes import OBS_SPACE, PassThrough, make_episode

from rlzmq.connectors.batching import BatchedNdArray
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode


class LateAttributes(PassThrough):
    """Sets what its spaces depend on after super().__init__()."""

    def __init__(self, observation_space: Any = None, action_space: Any = None, *, size: int = 7) -> None:
        super().__init__(observation_space, action_space)
        self.size = size

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        return gym.spaces.Box(-1, 1, (self.size,))


def multi_agent_episode() -> MultiAgentEpisode:
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent_id, episode: f"module_{agent_id}")
    episode.add_env_reset(observations={"a": np.zeros(2), "b": np.ones(2)})
    episode.add_env_step({"a": np.full(2, 2.0)}, {"a": 0, "b": 1}, {"a": 1.0, "b": 1.0})
    return episode


def test_the_iterator_yields_only_agents_that_stepped_unless_told_otherwise() -> None:
    episode = multi_agent_episode()
    stepped = [e.agent_id for e in ConnectorV2.single_agent_episode_iterator([episode])]
    everybody = [e.agent_id for e in ConnectorV2.single_agent_episode_iterator([episode], False)]
    assert (stepped, everybody) == (["a"], ["a", "b"])


def test_zip_with_batch_column_pairs_the_kth_item_with_the_kth_episode_of_a_key() -> None:
    one, two = make_episode(1), make_episode(1)
    chunk = SingleAgentEpisode(id_=one.id_, observations=[0])
    column = {(one.id_,): ["first", "third"], (two.id_,): ["second"]}
    pairs = ConnectorV2.single_agent_episode_iterator([one, two, chunk], zip_with_batch_column=column)
    assert [item for _, item in pairs] == ["first", "second", "third"]


def test_items_are_collected_by_episode_id() -> None:
    batch: dict[str, Any] = {}
    episode = make_episode(1)
    ConnectorV2.add_batch_item(batch, "c", 5, episode)
    ConnectorV2.add_batch_item(batch, "c", 6, single_agent_episode=episode)
    assert batch == {"c": {(episode.id_,): [5, 6]}}


def test_items_of_an_agent_are_collected_by_multi_agent_episode_agent_and_module() -> None:
    batch: dict[str, Any] = {}
    in_episode = SingleAgentEpisode(id_="S", agent_id="A", module_id="M", multi_agent_episode_id="E")
    alone = SingleAgentEpisode(id_="S", agent_id="A", module_id="M")
    ConnectorV2.add_batch_item(batch, "c", 5, in_episode)
    ConnectorV2.add_batch_item(batch, "c", 6, alone)
    assert batch == {"c": {("E", "A", "M"): [5], ("S", "A", "M"): [6]}}


def test_an_array_of_n_items_is_one_batched_entry() -> None:
    batch: dict[str, Any] = {}
    episode = make_episode(3)
    ConnectorV2.add_n_batch_items(batch, "c", {"x": np.arange(3)}, 3, episode)
    (entry,) = batch["c"][(episode.id_,)]
    assert isinstance(entry["x"], BatchedNdArray)


@pytest.mark.parametrize("items", [[1, 2], np.arange(4)])
def test_the_number_of_items_is_checked(items: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        ConnectorV2.add_n_batch_items({}, "c", items, 3, make_episode(3))


def test_foreach_changes_items_by_key_and_in_plain_lists() -> None:
    batch: dict[str, Any] = {"c": {("E", "A", "M"): [1, 2], ("F",): [3]}, "plain": [1, 2]}
    ConnectorV2.foreach_batch_item_change_in_place(batch, "c", lambda item, *ids: (item, ids))
    assert batch["c"] == {
        ("E", "A", "M"): [(1, ("E", "A", "M")), (2, ("E", "A", "M"))],
        ("F",): [(3, ("F", None, None))],
    }
    ConnectorV2.foreach_batch_item_change_in_place(batch, "plain", lambda item, *ids: -item)
    assert batch["plain"] == [-1, -2]


def test_foreach_changes_several_columns_together() -> None:
    batch = {"a": {("E",): [1, 2]}, "b": {("E",): [10, 20]}}
    ConnectorV2.foreach_batch_item_change_in_place(
        batch, ["a", "b"], lambda items, *ids: (sum(items), items[0])
    )
    assert batch == {"a": {("E",): [11, 22]}, "b": {("E",): [1, 2]}}


def test_switching_from_columns_to_modules() -> None:
    batch = {"obs": {"m1": 1, "m2": 2}, "actions": {"m1": 3}}
    expected = {"m1": {"obs": 1, "actions": 3}, "m2": {"obs": 2}}
    assert ConnectorV2.switch_batch_from_column_to_module_ids(batch) == expected


def test_spaces_may_depend_on_attributes_set_after_super_init() -> None:
    piece = LateAttributes(OBS_SPACE, size=5)
    assert piece.observation_space is not None
    assert piece.observation_space.shape == (5,)
