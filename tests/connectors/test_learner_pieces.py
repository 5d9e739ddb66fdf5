"""Learner pieces alone and as PPO's pipeline; V-trace equals the recursion of the paper, written as a loop."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from connector_fakes import OBS_SPACE, ValueModule, call, make_episode
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.connectors.common import AddObservationsFromEpisodesToBatch, BatchIndividualItems, NumpyToTensor
from rlzmq.connectors.learner import (
    AddColumnsFromEpisodesToTrainBatch,
    AddInfosFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    AddOneTsToEpisodesAndTruncate,
    ComputeReturnsToGo,
    FrameStackingLearner,
    GeneralAdvantageEstimation,
)
from rlzmq.connectors.learner.advantages import compute_gae
from rlzmq.connectors.learner.vtrace import compute_vtrace
from rlzmq.connectors.pipelines import LearnerConnectorPipeline
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode


def ppo_pipeline(gamma: float = 0.9, lambda_: float = 0.5) -> LearnerConnectorPipeline:
    return LearnerConnectorPipeline(
        connectors=[
            AddOneTsToEpisodesAndTruncate(),
            AddObservationsFromEpisodesToBatch(as_learner_connector=True),
            AddColumnsFromEpisodesToTrainBatch(),
            BatchIndividualItems(),
            NumpyToTensor(as_learner_connector=True),
            GeneralAdvantageEstimation(gamma=gamma, lambda_=lambda_),
        ]
    )


def gae_of_chunk(episode: Any, gamma: float, lambda_: float) -> np.ndarray:
    """The definition, step by step."""
    values = episode.get_observations().sum(-1).astype(np.float64)
    if episode.is_terminated:
        values[-1] = 0.0
    advantages = np.zeros(len(episode))
    following = 0.0
    for t in reversed(range(len(episode))):
        delta = episode.get_rewards(t) + gamma * values[t + 1] - values[t]
        following = advantages[t] = delta + gamma * lambda_ * following
    return advantages


# -- columns -----------------------------------------------------------------------------------------


def test_all_columns_of_the_chunks_steps_are_added_without_lookback() -> None:
    extras = {"action_logp": [0.0, 0.1, 0.2], "state_out": [1, 2, 3]}
    episode = make_episode(2, lookback=1, terminated=True, extras=extras)
    batch = call(AddColumnsFromEpisodesToTrainBatch(), [episode, make_episode(0, numpy=False)])
    key = (episode.id_,)
    assert set(batch) == {"actions", "rewards", "terminateds", "truncateds", "action_logp"}
    assert batch["actions"][key][0].tolist() == [2, 3]
    assert batch["rewards"][key][0].tolist() == [2.0, 3.0]
    assert batch["terminateds"][key] == [False, True]
    assert batch["truncateds"][key] == [False, False]
    assert batch["action_logp"][key][0].tolist() == [0.1, 0.2]


def test_infos_are_added_step_by_step() -> None:
    episode = SingleAgentEpisode(
        observations=[0, 1, 2],
        actions=[0, 0],
        rewards=[0.0, 0.0],
        infos=[{"a": 1}, {}, {"c": 3}],
        len_lookback_buffer=0,
    )
    batch = call(AddInfosFromEpisodesToTrainBatch(), [episode])
    assert batch["infos"] == {(episode.id_,): [{"a": 1}, {}]}


def test_returns_to_go_sum_discounted_rewards_to_the_chunks_end() -> None:
    episodes = [make_episode(3), make_episode(0, numpy=False), make_episode(1, lookback=2)]
    batch = call(ComputeReturnsToGo(gamma=0.5), episodes)
    assert batch["returns_to_go"][(episodes[0].id_,)][0].tolist() == [1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3]
    assert batch["returns_to_go"][(episodes[2].id_,)][0].tolist() == [3]


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("terminated", [False, True])
def test_every_chunk_gets_one_masked_step(numpy: bool, terminated: bool) -> None:
    episode = make_episode(2, terminated=terminated, numpy=numpy, extras={"x": [1, 2]})
    key = (episode.id_,)
    batch = call(AddOneTsToEpisodesAndTruncate(), [episode])
    assert batch["loss_mask"][key] == [True, True, False]
    assert batch["terminateds"][key] == [False, terminated, False]
    assert batch["truncateds"][key] == [False, not terminated, False]
    assert (len(episode), (episode.id_,)) == (3, key)
    assert (episode.is_terminated, episode.is_truncated) == (terminated, not terminated)
    np.testing.assert_array_equal(episode.get_observations([-2, -1]), [[2, -2], [2, -2]])
    assert list(episode.get_actions()) == [1, 2, 2]
    assert list(episode.get_rewards()) == [1.0, 2.0, 0.0]
    assert list(episode.get_extra_model_outputs("x")) == [1, 2, 2]
    assert len(episode.get_infos()) == 4


# -- GeneralAdvantageEstimation ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.floats(-5, 5)), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_advantages_equal_the_definition(
    chunks: list[tuple[int, bool, float]], gamma: float, lambda_: float
) -> None:
    episodes = [make_episode(n, terminated=end, offset=offset) for n, end, offset in chunks]
    columns = ppo_pipeline(gamma, lambda_)(rl_module={"default_policy": ValueModule()}, episodes=episodes)[
        "default_policy"
    ]
    mask = columns["loss_mask"]
    raw = np.concatenate([gae_of_chunk(episode, gamma, lambda_) for episode in episodes])
    values = np.concatenate([episode.get_observations(slice(0, -1)).sum(-1) for episode in episodes])
    np.testing.assert_allclose(columns["value_targets"][mask], raw + values, rtol=1e-4, atol=1e-3)
    expected = (raw - raw.mean()) / max(1e-4, raw.std())
    np.testing.assert_allclose(columns["advantages"][mask], expected, rtol=1e-3, atol=1e-2)
    assert columns["advantages"][~mask].tolist() == [0.0] * len(episodes)
    assert columns["advantages"].dtype == torch.float32


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*got \(2,\)"):
        compute_gae([1, 2], [1, 2], [0], [3], gamma=1.0, lambda_=1.0)
    with pytest.raises(ValueError, match="1 bootstrap values"):
        compute_gae([1, 2], [1, 2], [0, 0], [2], gamma=1.0, lambda_=1.0)


def test_zero_length_chunks_are_tolerated_everywhere() -> None:
    episodes = [make_episode(0, numpy=False), make_episode(2), make_episode(0, numpy=False)]
    batch = ppo_pipeline()(rl_module={"default_policy": ValueModule()}, episodes=episodes)
    assert batch["default_policy"]["obs"].shape == (3, 2)
    frames = LearnerConnectorPipeline(
        OBS_SPACE,
        connectors=[FrameStackingLearner(num_frames=2), AddNextObservationsFromEpisodesToTrainBatch()],
    )
    assert len(frames(episodes=episodes)["new_obs"]) == 1


def vtrace_by_loop(
    behavior: np.ndarray, target: np.ndarray, rewards: np.ndarray, values: np.ndarray, bootstrap: float,
    gamma: float, rho_bar: float, c_bar: float, pg_bar: float,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    targets, advantages = np.zeros_like(rewards), np.zeros_like(rewards)
    following_target, following_value = bootstrap, bootstrap
    for t in range(len(rewards) - 1, -1, -1):
        ratio = np.exp(target[t] - behavior[t])
        delta = min(rho_bar, ratio) * (rewards[t] + gamma * following_value - values[t])
        advantages[t] = min(pg_bar, ratio) * (rewards[t] + gamma * following_target - values[t])
        correction = gamma * min(c_bar, ratio) * (following_target - following_value)
        targets[t] = values[t] + delta + correction
        following_target, following_value = targets[t], values[t]
    return advantages, targets


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    bars=st.sampled_from([(1.0, 1.0, 1.0), (1.0, 0.8, 1.2), (None, 0.5, None)]),
    seed=st.integers(0, 1000),
)
def test_vtrace_equals_the_loop(lengths: list[int], bars: tuple[Any, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    behavior, target, rewards, values = rng.normal(size=(4, sum(lengths)))
    bootstrap = rng.normal(size=len(lengths)) * rng.integers(0, 2, len(lengths))
    rho_bar, c_bar, pg_bar = bars
    advantages, targets = compute_vtrace(
        behavior_logp_N=behavior,
        target_logp_N=target,
        rewards_N=rewards,
        values_N=values,
        bootstrap_values_C=bootstrap,
        lengths_C=lengths,
        gamma=0.9,
        clip_rho_threshold=rho_bar,
        clip_c_threshold=c_bar,
        clip_pg_rho_threshold=pg_bar,
    )
    bounds = np.cumsum([0, *lengths])
    for i, (first, last) in enumerate(itertools.pairwise(bounds)):
        of_chunk = (part[first:last] for part in (behavior, target, rewards, values))
        bar_values = (np.inf if bar is None else bar for bar in bars)
        expected = vtrace_by_loop(*of_chunk, bootstrap[i], 0.9, *bar_values)  # type: ignore[misc]
        np.testing.assert_allclose(advantages[first:last], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(targets[first:last], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"bootstrap_values_C": [0.0, 0.0]}, "expected 1 chunks"),
        ({"lengths_C": [4, 0], "bootstrap_values_C": [0.0, 0.0]}, "1 row or more"),
    ],
)
def test_shapes_that_differ_are_refused_by_name(wrong: dict[str, Any], text: str) -> None:
    columns = dict.fromkeys(("behavior_logp_N", "target_logp_N", "rewards_N", "values_N"), np.ones(4))
    with pytest.raises(ValueError, match=text):
        compute_vtrace(**{"bootstrap_values_C": [0.0], "lengths_C": [4], **columns, **wrong}, gamma=0.9)
