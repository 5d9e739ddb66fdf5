"""Env-to-module pieces, each called alone on hand-made episodes; MeanStdFilter's numbers, and its copies."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from connector_fakes import ACTION_SPACE, OBS_SPACE, call, make_episode
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlzmq.connectors.common import AddObservationsFromEpisodesToBatch, NumpyToTensor
from rlzmq.connectors.env_to_module import (
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PrevActionsPrevRewards,
    SingleAgentObservationPreprocessor,
    WriteObservationsToEpisodes,
)
from rlzmq.connectors.env_to_module.mean_std_filter import RunningStats
from rlzmq.connectors.learner import FrameStackingLearner
from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

NESTED_SPACE = gym.spaces.Dict(
    {
        "c": gym.spaces.MultiDiscrete([2, 3]),
        "a": gym.spaces.Box(-10.0, 10.0, (), np.float32),
        "b": gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-1.0, 1.0, (2, 1), np.float32)]),
    }
)


def nested_episode() -> SingleAgentEpisode:
    observation = {
        "a": np.array(-10.0, np.float32),
        "b": (1, np.array([[-1.0], [-0.5]], np.float32)),
        "c": np.array([0, 2]),
    }
    return SingleAgentEpisode(observations=[observation])


# -- BatchIndividualItems, NumpyToTensor -------------------------------------------------------------


def test_arrays_at_any_depth_become_tensors_and_float64_becomes_float32() -> None:
    batch = {
        "obs": {"x": np.zeros((2, 3)), "y": (np.zeros(2, np.uint8), np.zeros(2, bool))},
        "actions": np.zeros(2, np.int64),
        "infos": [{}, {}],
    }
    tensors = call(NumpyToTensor(), [], batch)
    assert tensors["obs"]["x"].dtype == torch.float32
    assert tensors["obs"]["y"][0].dtype == torch.uint8
    assert tensors["obs"]["y"][1].dtype == torch.bool
    assert tensors["actions"].dtype == torch.int64
    assert tensors["infos"] == [{}, {}]


def test_read_only_and_reversed_arrays_become_tensors_without_a_warning() -> None:
    array = np.arange(3.0, dtype=np.float32)
    array.flags.writeable = False
    tensors = call(NumpyToTensor(), [], {"a": array, "b": array[::-1], "c": array[::2]})
    assert tensors["a"].tolist() == [0, 1, 2]
    assert tensors["b"].tolist() == [2, 1, 0]
    assert tensors["c"].tolist() == [0, 2]


# -- FlattenObservations -----------------------------------------------------------------------------


def test_nested_observations_are_flattened_in_the_episode() -> None:
    piece = FlattenObservations(NESTED_SPACE, gym.spaces.Discrete(2))
    episode = nested_episode()
    assert call(piece, [episode]) == {}
    expected = [-10.0, 0.0, 1.0, -1.0, -0.5, 1.0, 0.0, 0.0, 0.0, 1.0]
    np.testing.assert_array_equal(episode.get_observations(0), expected)
    assert piece.observation_space == gym.spaces.Box(-np.inf, np.inf, (10,), np.float32)
    assert episode.observation_space == piece.observation_space


def test_removed_keys_are_neither_in_the_space_nor_in_the_observations() -> None:
    piece = FlattenObservations(NESTED_SPACE, keys_to_remove=["b", "c"])
    episode = nested_episode()
    call(piece, [episode])
    assert piece.observation_space is not None
    assert piece.observation_space.shape == (1,)
    assert episode.get_observations(0).tolist() == [-10.0]


def test_an_unknown_key_to_remove_is_an_error_with_a_suggestion() -> None:
    space = gym.spaces.Dict({"position": gym.spaces.Discrete(2), "speed": gym.spaces.Discrete(2)})
    with pytest.raises(ConfigurationError, match="Did you mean 'position'"):
        FlattenObservations(space, keys_to_remove=["positon"])
    with pytest.raises(ConfigurationError, match="expected a Dict space"):
        FlattenObservations(gym.spaces.Discrete(2), keys_to_remove=["x"])


@pytest.mark.parametrize("numpy", [False, True])
def test_as_learner_connector_all_observations_are_flattened_and_then_stacked(numpy: bool) -> None:
    episode = SingleAgentEpisode(
        "e", observations=[2, 0, 1], actions=[0, 0], rewards=[0.0, 0.0], len_lookback_buffer=0
    )
    episodes = [episode.to_numpy() if numpy else episode]
    batch = call(FlattenObservations(gym.spaces.Discrete(3), as_learner_connector=True), episodes)
    stack = FrameStackingLearner(gym.spaces.Box(0, 1, (3,)), num_frames=2)
    (stacked,) = stack(batch=dict(batch), episodes=episodes, shared_data={})["obs"][("e",)]
    assert stacked.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0]]
    batch = call(AddObservationsFromEpisodesToBatch(as_learner_connector=True), episodes, batch)
    flat = np.concatenate([np.atleast_2d(item) for item in batch["obs"][("e",)]])
    assert flat.tolist() == [[0, 0, 1], [1, 0, 0]]


# -- PrevActionsPrevRewards --------------------------------------------------------------------------


def test_previous_actions_and_rewards_join_the_observation_and_fit_the_space() -> None:
    piece = PrevActionsPrevRewards(OBS_SPACE, ACTION_SPACE, n_prev_actions=2, n_prev_rewards=3)
    episodes = [make_episode(n, numpy=False) for n in (0, 1, 4)]
    assert call(piece, episodes) == {}
    first, second, third = (episode.get_observations(-1) for episode in episodes)
    assert first["prev_n_actions"].tolist() == [0] * 6
    assert first["prev_n_rewards"].tolist() == [0, 0, 0]
    assert second["prev_n_actions"].tolist() == [0, 0, 0, 1, 0, 0]
    assert second["prev_n_rewards"].tolist() == [0, 0, 1]
    assert third["prev_n_actions"].tolist() == [0, 0, 1, 1, 0, 0]
    assert third["prev_n_rewards"].tolist() == [2, 3, 4]
    np.testing.assert_array_equal(third["_orig_obs"], [4, -4])
    space = piece.observation_space
    assert isinstance(space, gym.spaces.Dict)
    assert space["prev_n_actions"].contains(third["prev_n_actions"])
    assert space["prev_n_rewards"].contains(third["prev_n_rewards"])
    assert episodes[2].observation_space == space


def test_previous_actions_are_oldest_first_in_a_traced_policy_too() -> None:
    piece = PrevActionsPrevRewards(OBS_SPACE, ACTION_SPACE, n_prev_actions=2, n_prev_rewards=0)
    traced = piece.to_torch(rl_module=None, agent_id=None)
    assert traced.remember is not None
    memory = {name: torch.as_tensor(value)[None] for name, value in traced.initial_memory.items()}
    for action in (3, 1):
        memory = traced.remember({"actions": torch.tensor([action])}, memory)
    batch, _ = traced.forward({"obs": torch.zeros(1, 2)}, memory)
    assert batch["obs"]["prev_n_actions"].tolist() == [[0, 0, 1, 1, 0, 0]]


# -- FrameStackingEnvToModule ------------------------------------------------------------------------


def test_frames_are_stacked_on_the_last_axis_oldest_first_with_zeros_before_the_start() -> None:
    piece = FrameStackingEnvToModule(gym.spaces.Box(-9, 9, (2, 2, 1)), num_frames=3)
    assert piece.observation_space is not None
    assert piece.observation_space.shape == (2, 2, 3)
    episode = SingleAgentEpisode(
        observations=[np.full((2, 2, 1), i + 1, np.float32) for i in range(2)], actions=[0], rewards=[0.0]
    )
    batch = call(piece, [episode])
    (stacked,) = batch["obs"][(episode.id_,)]
    np.testing.assert_array_equal(stacked, np.broadcast_to([0, 1, 2], (2, 2, 3)))
    assert episode.get_observations(-1).shape == (2, 2, 1)


def test_frame_stacking_refuses_spaces_that_are_no_boxes() -> None:
    with pytest.raises(UnsupportedSpaceError, match="FlattenObservations"):
        FrameStackingEnvToModule(gym.spaces.Discrete(3), num_frames=2)
    with pytest.raises(ValueError, match="at least 1"):
        FrameStackingEnvToModule(num_frames=0)


# -- preprocessors, WriteObservationsToEpisodes ------------------------------------------------------


class Half(SingleAgentObservationPreprocessor):
    """Keeps the first element only."""

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        return gym.spaces.Box(-1, 1, (1,))

    def preprocess(self, observation: Any, episode: Any) -> Any:
        return observation[:1] + len(episode)


@pytest.mark.parametrize("numpy", [False, True])
def test_preprocessed_observations_are_written_into_the_episode(numpy: bool) -> None:
    episode = make_episode(2, numpy=numpy)
    piece = Half(OBS_SPACE)
    assert call(piece, [episode]) == {}
    assert episode.get_observations(-1).tolist() == [4.0]
    assert [list(observation) for observation in episode.get_observations()] == [[0, 0], [1, -1], [4]]
    assert episode.observation_space is piece.observation_space


def test_the_batchs_observations_are_written_into_the_episodes() -> None:
    episodes = [make_episode(1, numpy=False), make_episode(1, numpy=False)]
    piece = WriteObservationsToEpisodes(gym.spaces.Box(0, 1, (3,)))
    batch = {"obs": [np.zeros(3), np.ones(3)]}
    assert call(piece, episodes, batch) is batch
    assert [episode.get_observations(-1).tolist() for episode in episodes] == [[0, 0, 0], [1, 1, 1]]
    assert episodes[0].observation_space is piece.observation_space
    by_episode = {"obs": {(episode.id_,): [np.full(3, 5.0)] for episode in episodes}}
    call(piece, episodes, by_episode)
    assert episodes[1].get_observations(-1).tolist() == [5, 5, 5]


def feed(piece: MeanStdFilter, observations: Any) -> list[np.ndarray]:
    """Shows each observation as a new episode's first one; returns what they became."""
    episodes = [SingleAgentEpisode(observations=[np.asarray(o, np.float32)]) for o in observations]
    assert call(piece, episodes) == {}
    return [episode.get_observations(-1) for episode in episodes]


def total(piece: MeanStdFilter) -> RunningStats:
    state = piece.get_state()["default_agent"]
    return RunningStats.from_state(state["base"]).merged(RunningStats.from_state(state["delta"]))


def test_each_observation_is_normalised_by_all_up_to_itself() -> None:
    outputs = feed(MeanStdFilter(OBS_SPACE), [[1.0, 2.0], [3.0, 2.0], [5.0, 9.0]])
    np.testing.assert_allclose(outputs[0], [0.0, 0.0])
    np.testing.assert_allclose(outputs[1], [np.sqrt(0.5), 0.0], rtol=1e-5)
    np.testing.assert_allclose(outputs[2], [1.0, 1.1547], rtol=1e-4)
    assert outputs[0].dtype == np.float32


def test_results_are_clipped() -> None:
    piece = MeanStdFilter(OBS_SPACE, clip_by_value=0.5)
    assert np.abs(feed(piece, [[0.0, 0.0], [100.0, -100.0], [0.0, 0.0]])).max() == 0.5


def test_mean_and_deviation_can_be_left_alone() -> None:
    samples = [[1.0, 10.0], [3.0, 30.0]]
    centered = feed(MeanStdFilter(OBS_SPACE, de_std_to_one=False, clip_by_value=None), samples)
    np.testing.assert_allclose(centered[1], [1.0, 10.0])
    scaled = feed(MeanStdFilter(OBS_SPACE, de_mean_to_zero=False, clip_by_value=None), samples)
    np.testing.assert_allclose(scaled[1], [3 / np.sqrt(2), 30 / np.sqrt(200)], rtol=1e-5)


def test_only_box_parts_are_filtered() -> None:
    space = gym.spaces.Dict({"x": gym.spaces.Box(-1, 1, (1,)), "d": gym.spaces.Discrete(3)})
    piece = MeanStdFilter(space)
    episode = SingleAgentEpisode(observations=[{"x": np.array([0.5], np.float32), "d": 2}])
    call(piece, [episode])
    assert episode.get_observations(-1) == {"x": [0.0], "d": 2}
    assert isinstance(piece.observation_space, gym.spaces.Dict)
    assert piece.observation_space["d"] == gym.spaces.Discrete(3)


def test_frozen_statistics_are_used_but_do_not_change() -> None:
    piece = MeanStdFilter(OBS_SPACE)
    feed(piece, [[0.0, 0.0], [2.0, 4.0]])
    piece.freeze_statistics()
    before = piece.get_state()
    (output,) = feed(piece, [[3.0, 6.0]])
    np.testing.assert_allclose(output, [np.sqrt(2), np.sqrt(2)], rtol=1e-5)
    np.testing.assert_equal(piece.get_state(), before)
    (raw,) = feed(MeanStdFilter(OBS_SPACE, update_stats=False), [[0.25, 4.0]])
    np.testing.assert_allclose(raw, [0.25, 4.0], rtol=1e-4)


def test_a_merged_state_keeps_what_came_after_the_last_delta() -> None:
    driver, runner = MeanStdFilter(OBS_SPACE), MeanStdFilter(OBS_SPACE)
    feed(runner, np.zeros((3, 2)))
    driver.merge_deltas([runner.get_delta()])
    feed(runner, np.ones((2, 2)))
    runner.apply_merged_state(driver.get_state())
    assert total(runner).num == 5
    assert runner.get_delta()["default_agent"]["num"] == 2
    assert runner.get_delta() == {}


@given(
    arrays(np.float32, st.tuples(st.integers(1, 30), st.just(2)), elements=st.floats(-1e3, 1e3, width=32)),
    st.lists(st.integers(0, 2), min_size=30, max_size=30),
    st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_any_split_over_runners_and_synchronisations_equals_one_filter(
    samples: np.ndarray, owners: list[int], syncs: list[bool]
) -> None:
    driver, alone = MeanStdFilter(OBS_SPACE), MeanStdFilter(OBS_SPACE)
    runners = [MeanStdFilter(OBS_SPACE) for _ in range(3)]

    def synchronize() -> None:
        driver.merge_deltas([runner.get_delta() for runner in runners])
        for runner in runners:
            runner.apply_merged_state(driver.get_state())

    for sample, owner, sync in zip(samples, owners, syncs, strict=False):
        feed(runners[owner], [sample])
        feed(alone, [sample])
        if sync:
            synchronize()
    synchronize()
    for piece in (driver, *runners):
        assert total(piece).num == len(samples)
        np.testing.assert_allclose(total(piece).means[0], total(alone).means[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(total(piece).m2s[0], total(alone).m2s[0], rtol=1e-5, atol=1e-3)


def test_agents_have_filters_of_their_own() -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Box(-9, 9, (1,)), "b": gym.spaces.Box(-9, 9, (2,))})
    piece = MeanStdFilter(space, multi_agent=True)
    episode = MultiAgentEpisode()
    episode.add_env_reset(
        observations={"a": np.array([1.0], np.float32), "b": np.array([1.0, 5.0], np.float32)}
    )
    call(piece, [episode])
    episode.add_env_step({"a": np.array([3.0], np.float32)}, {"a": 0, "b": 0}, {"a": 1.0})
    call(piece, [episode])
    state = piece.get_state()
    assert {agent_id: stats["delta"]["num"] for agent_id, stats in state.items()} == {"a": 2, "b": 1}
    np.testing.assert_allclose(episode.agent_episodes["a"].get_observations(-1), [np.sqrt(0.5)], rtol=1e-5)
    assert isinstance(piece.observation_space, gym.spaces.Dict)
    assert piece.observation_space["b"] == gym.spaces.Box(-10, 10, (2,), np.float32)
