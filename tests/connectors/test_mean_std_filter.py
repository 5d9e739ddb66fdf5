"""MeanStdFilter: its numbers, and how copies of it agree."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from connector_fakes import OBS_SPACE, call
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.connectors.env_to_module.mean_std_filter import RunningStats
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode


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


@settings(max_examples=60, deadline=None)
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
