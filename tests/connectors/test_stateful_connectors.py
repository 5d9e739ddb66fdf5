"""Stateful modules: time axes, sequences, and the state before each of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from connector_fakes import StatefulModule, ValueModule, call, make_episode
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.connectors.common import (
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    BatchIndividualItems,
    NumpyToTensor,
)
from rlzmq.connectors.learner import (
    AddColumnsFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    AddOneTsToEpisodesAndTruncate,
    GeneralAdvantageEstimation,
)
from rlzmq.connectors.pipelines import EnvToModulePipeline, LearnerConnectorPipeline


def states(num: int, first: int = 0) -> list[dict[str, np.ndarray]]:
    """state_out of steps: step t leaves [t, t]."""
    return [{"h": np.full(2, first + t, np.float32)} for t in range(num)]


def learner_pipeline(*, with_gae: bool = False, with_next: bool = False) -> LearnerConnectorPipeline:
    return LearnerConnectorPipeline(
        connectors=[
            *([AddOneTsToEpisodesAndTruncate()] if with_gae else []),
            AddObservationsFromEpisodesToBatch(as_learner_connector=True),
            *([AddNextObservationsFromEpisodesToTrainBatch()] if with_next else []),
            AddColumnsFromEpisodesToTrainBatch(),
            AddTimeDimToBatchAndZeroPad(as_learner_connector=True),
            AddStatesFromEpisodesToBatch(as_learner_connector=True),
            BatchIndividualItems(),
            NumpyToTensor(as_learner_connector=True),
            *([GeneralAdvantageEstimation(gamma=0.9, lambda_=0.5)] if with_gae else []),
        ]
    )


def train_batch(episodes: Any, **kwargs: bool) -> dict[str, Any]:
    batch = learner_pipeline(**kwargs)(rl_module={"default_policy": StatefulModule()}, episodes=episodes)
    return batch["default_policy"]  # type: ignore[no-any-return]


def test_env_runners_get_a_time_axis_and_states_without_one() -> None:
    pipeline = EnvToModulePipeline(
        connectors=[
            AddObservationsFromEpisodesToBatch(),
            AddTimeDimToBatchAndZeroPad(),
            AddStatesFromEpisodesToBatch(),
            BatchIndividualItems(),
            NumpyToTensor(),
        ]
    )
    shared_data: dict[str, Any] = {}
    new, running = make_episode(0, numpy=False), make_episode(2, numpy=False, extras={"state_out": states(2)})
    cut = running.cut(1)
    batch = call(pipeline, [new, running, cut], rl_module=StatefulModule(), shared_data=shared_data)
    assert batch["obs"].shape == (3, 1, 2)
    assert batch["state_in"]["h"].tolist() == [[100, 100], [1, 1], [1, 1]]
    assert shared_data["_added_single_ts_time_rank"] is True


def test_an_unknown_first_state_is_an_error_that_says_what_to_set() -> None:
    episode = make_episode(2, t_started=5, extras={"state_out": states(2)})
    with pytest.raises(ValueError, match=r"starts at t=5.*episode_lookback_horizon=1"):
        train_batch([episode])


def test_advantages_of_sequences_equal_those_without_time_axis() -> None:
    episodes = [make_episode(n, terminated=n == 4, extras={"state_out": states(n)}) for n in (4, 2, 6)]
    stateful = train_batch(episodes, with_gae=True)
    flat = learner_pipeline(with_gae=True)(rl_module={"default_policy": ValueModule()}, episodes=episodes)
    mask = stateful["loss_mask"]
    assert int(mask.sum()) == 12
    for name in ("advantages", "value_targets"):
        assert stateful[name].shape == stateful["obs"].shape[:2]
        expected = flat["default_policy"][name][flat["default_policy"]["loss_mask"]]
        assert torch.equal(stateful[name][mask], expected)
        assert not stateful[name][~mask].any()


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 8), max_size=5),
    st.booleans(),
)
def test_any_cut_of_episodes_gives_every_step_once_with_the_right_state(
    lengths: list[int], cuts: list[int], stored: bool
) -> None:
    """However episodes are cut into chunks, a sequence starts from the state that its step started from."""
    chunks = []
    for length in lengths:
        whole = make_episode(length, extras={"state_out": states(length)})
        whole.initial_state = {"h": np.full(2, 100, np.float32)} if stored else None
        borders = sorted({0, length, *(cut for cut in cuts if cut < length)})
        for start, stop in itertools.pairwise(borders):
            chunk = whole.slice(slice(start, stop), len_lookback_buffer=1)
            if not stored:
                chunk.initial_state = None
            chunks.append(chunk)
    columns = train_batch(chunks)
    mask = columns["loss_mask"]
    seen = columns["obs"][mask][:, 0].tolist()
    assert seen == [float(t) for length in lengths for t in range(length)]
    starts = columns["obs"][:, 0, 0].tolist()
    expected = [100.0 if t == 0 else t - 1 for t in starts]
    assert columns["state_in"]["h"][:, 0].tolist() == expected
    assert columns["seq_lens"].tolist() == mask.sum(1).tolist()
    assert set(columns["actions"].flatten().tolist()) == set(columns["actions"][mask].tolist())
