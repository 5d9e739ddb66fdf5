"""The pipelines that configs build: order of pieces, user callables of any arity, plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from connector_fakes import ACTION_SPACE, OBS_SPACE, call, make_episode

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.defaults import (
    add_estimator,
    add_next_observations,
    build_env_to_module,
    build_learner,
    build_module_to_env,
)
from rlzmq.connectors.env_to_module import FlattenObservations, FrameStackingEnvToModule, MeanStdFilter
from rlzmq.connectors.learner import (
    AddInfosFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    ComputeReturnsToGo,
    FrameStackingLearner,
    GeneralAdvantageEstimation,
)
from rlzmq.core.errors import ConfigurationError

SPACES = {"__env_single__": (OBS_SPACE, ACTION_SPACE)}


class UserPiece(ConnectorV2):
    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):  # type: ignore[no-untyped-def,override]
        return batch


def config(**kwargs: Any) -> Any:
    settings = {"is_multi_agent": False, "normalize_actions": True, "clip_actions": False, **kwargs}
    return SimpleNamespace(**settings)


def multi(**kwargs: Any) -> Any:
    return config(is_multi_agent=True, policies={"m"}, policy_mapping_fn=lambda a, e, **kw: "m", **kwargs)


ENV_TO_MODULE = [
    "AddObservationsFromEpisodesToBatch",
    "AddTimeDimToBatchAndZeroPad",
    "AddStatesFromEpisodesToBatch",
    "BatchIndividualItems",
    "NumpyToTensor",
]
MODULE_TO_ENV = [
    "GetActions",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
    "RemoveSingleTsTimeRankFromBatch",
    "UserPiece",
    "NormalizeAndClipActions",
    "ListifyDataForVectorEnv",
]
LEARNER = [
    "AddObservationsFromEpisodesToBatch",
    "AddColumnsFromEpisodesToTrainBatch",
    "AddTimeDimToBatchAndZeroPad",
    "AddStatesFromEpisodesToBatch",
    "BatchIndividualItems",
    "NumpyToTensor",
]


def test_env_to_module_pieces_are_in_rllibs_order() -> None:
    with_user = config(env_to_module_connector=lambda env, spaces, device: [UserPiece()])
    assert build_env_to_module(with_user, None, SPACES).piece_names == ["UserPiece", *ENV_TO_MODULE]
    names = build_env_to_module(multi(), None, None).piece_names
    assert names == [*ENV_TO_MODULE[:3], "AgentToModuleMapping", *ENV_TO_MODULE[3:]]


def test_module_to_env_pieces_are_in_rllibs_order() -> None:
    with_user = config(module_to_env_connector=lambda env, spaces: UserPiece())
    assert build_module_to_env(with_user, None, SPACES).piece_names == MODULE_TO_ENV
    names = build_module_to_env(multi(module_to_env_connector=UserPiece), None, None).piece_names
    assert names == [*MODULE_TO_ENV[:3], "ModuleToAgentUnmapping", *MODULE_TO_ENV[3:]]


def test_learner_pieces_are_in_rllibs_order() -> None:
    pipeline = build_learner(config(learner_connector=lambda obs, act: UserPiece()), OBS_SPACE, ACTION_SPACE)
    add_estimator(pipeline, GeneralAdvantageEstimation(gamma=0.9, lambda_=0.95))
    expected = ["AddOneTsToEpisodesAndTruncate", "UserPiece", *LEARNER, "GeneralAdvantageEstimation"]
    assert pipeline.piece_names == expected
    names = build_learner(multi()).piece_names
    assert names == [*LEARNER[:4], "AgentToModuleMapping", *LEARNER[4:]]
    off_policy = build_learner(config())
    add_next_observations(off_policy)
    assert off_policy.piece_names[:2] == [LEARNER[0], "AddNextObservationsFromEpisodesToTrainBatch"]


def test_default_pieces_can_be_left_out() -> None:
    bare = config(
        env_to_module_connector=lambda: UserPiece(),
        add_default_connectors_to_env_to_module_pipeline=False,
        add_default_connectors_to_module_to_env_pipeline=False,
        add_default_connectors_to_learner_pipeline=False,
    )
    assert build_env_to_module(bare).piece_names == ["UserPiece"]
    assert build_module_to_env(bare).piece_names == []
    assert build_learner(bare).piece_names == []


@pytest.mark.parametrize(
    "func",
    [
        lambda: [UserPiece()],
        lambda env: UserPiece(),
        lambda env, spaces: [UserPiece()],
        lambda env, spaces, device: (UserPiece(),),
        lambda env, spaces=None, device=None: UserPiece(),
        lambda *args: [UserPiece()] if len(args) == 3 else None,
        lambda **kwargs: [UserPiece()] if set(kwargs) == {"env", "spaces", "device"} else None,
        lambda spaces: [UserPiece()] if spaces is SPACES else None,
        lambda e, s, d: [UserPiece()] if s is SPACES else None,
        lambda e, s, *, flag=True: [UserPiece()] if s is SPACES else None,
        UserPiece,
        UserPiece(),
        [UserPiece()],
    ],
)
def test_user_callables_of_any_arity_are_accepted(func: Any) -> None:
    pipeline = build_env_to_module(config(env_to_module_connector=func), None, SPACES)
    assert pipeline.piece_names == ["UserPiece", *ENV_TO_MODULE]


def test_learner_callables_get_the_spaces() -> None:
    def make(input_observation_space: Any, input_action_space: Any) -> Any:
        assert (input_observation_space, input_action_space) == (OBS_SPACE, ACTION_SPACE)
        return FrameStackingLearner(num_frames=2)

    pipeline = build_learner(config(learner_connector=make), OBS_SPACE, ACTION_SPACE)
    assert pipeline.observation_space is not None
    assert pipeline.observation_space.shape == (4,)


@pytest.mark.parametrize("value", [lambda env: 5, lambda env: [UserPiece], "UserPiece"])
def test_something_else_than_pieces_is_an_error_that_names_the_setting(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"config.env_to_module_connector: expected a ConnectorV2"):
        build_env_to_module(config(env_to_module_connector=value), None, SPACES)


def test_a_callable_with_too_many_arguments_is_an_error_that_shows_it() -> None:
    with pytest.raises(ConfigurationError, match=r"\(env, spaces, device\).*\(a, b, c, d\)"):
        build_env_to_module(config(env_to_module_connector=lambda a, b, c, d: []), None, SPACES)


def test_spaces_come_from_the_env_where_none_are_given() -> None:
    env = SimpleNamespace(single_observation_space=OBS_SPACE, single_action_space=ACTION_SPACE)
    pipeline = build_env_to_module(config(), env)
    assert (pipeline.observation_space, pipeline.action_space) == (OBS_SPACE, ACTION_SPACE)


def test_evaluation_pipelines_do_not_learn_from_samples() -> None:
    evaluating = config(env_to_module_connector=lambda env: MeanStdFilter(), in_evaluation=True)
    pipeline = build_env_to_module(evaluating, None, SPACES)
    call(pipeline, [make_episode(0, numpy=False)])
    assert pipeline.get_state() == {}


def test_plans_name_the_non_default_pieces() -> None:
    with_pieces = config(
        env_to_module_connector=lambda: [
            MeanStdFilter(),
            FlattenObservations(),
            FrameStackingEnvToModule(num_frames=3),
        ]
    )
    plan = build_env_to_module(with_pieces, None, SPACES).columnar_plan()
    assert plan is not None
    assert [type(piece).__name__ for piece in plan.writers] == ["MeanStdFilter", "FlattenObservations"]
    assert [type(piece).__name__ for piece in plan.readers] == ["FrameStackingEnvToModule"]
    assert plan.stored_observation_space == gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert plan.observation_space is not None
    assert plan.observation_space.shape == (6,)
    assert plan.required_lookback == 2
    to_env = build_module_to_env(config(), None, SPACES).columnar_plan()
    assert to_env is not None
    assert to_env.normalize is not None
    assert (
        build_module_to_env(config(normalize_actions=False), None, SPACES).columnar_plan().normalize is None
    )  # type: ignore[union-attr]


def test_learner_plans_know_their_algorithms_pieces() -> None:
    pieces = [ComputeReturnsToGo(gamma=0.5), FrameStackingLearner(num_frames=2)]
    pipeline = build_learner(config(learner_connector=lambda: pieces), OBS_SPACE, ACTION_SPACE)
    add_next_observations(pipeline)
    add_estimator(pipeline, GeneralAdvantageEstimation(gamma=0.9, lambda_=0.95))
    pipeline.insert_after("AddColumnsFromEpisodesToTrainBatch", AddInfosFromEpisodesToTrainBatch())
    plan = pipeline.columnar_plan()
    assert plan is not None
    assert (plan.add_one_ts, plan.next_observations, plan.infos) == (True, True, True)
    assert plan.column_pieces == (pieces[0],)
    assert plan.observation_pieces == (pieces[1],)
    assert plan.estimator is pipeline[-1]


def test_next_observations_before_pieces_that_rewrite_observations_have_no_plan() -> None:
    flatten = FlattenObservations(as_learner_connector=True)
    for pieces, has_plan in (
        ([AddNextObservationsFromEpisodesToTrainBatch(), FrameStackingLearner(num_frames=2)], True),
        ([flatten, AddNextObservationsFromEpisodesToTrainBatch()], True),
        ([AddNextObservationsFromEpisodesToTrainBatch(), flatten], False),
    ):
        pipeline = build_learner(config(learner_connector=pieces), OBS_SPACE, ACTION_SPACE)
        assert (pipeline.columnar_plan() is not None) is has_plan


class OverridesCall(MeanStdFilter):
    def __call__(self, **kwargs: Any) -> dict[str, Any]:
        return super().__call__(**kwargs)


class ColumnarReader(ConnectorV2):
    columnar = True

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return batch

    def transform_observations(self, observations: Any, rows: Any) -> Any:
        return observations


@pytest.mark.parametrize(
    "pieces",
    [
        [UserPiece()],
        [OverridesCall()],
        [ColumnarReader(), ColumnarReader()],
    ],
)
def test_pipelines_that_need_the_per_episode_protocol_have_no_plan(pieces: Any) -> None:
    pipeline = build_env_to_module(config(env_to_module_connector=lambda: pieces), None, SPACES)
    assert pipeline.columnar_plan() is None


def test_timed_pipelines_have_no_plan_as_their_pieces_must_be_called() -> None:
    timed = config(connector_timers=True)
    for pipeline in (build_env_to_module(timed), build_module_to_env(timed), build_learner(timed)):
        assert pipeline.time_pieces
        assert pipeline.columnar_plan() is None


def test_edited_default_pieces_have_no_plan() -> None:
    pipeline = build_env_to_module(config(), None, SPACES)
    assert pipeline.columnar_plan() is not None
    pipeline.append(UserPiece())
    assert pipeline.columnar_plan() is None
    to_env = build_module_to_env(config(module_to_env_connector=UserPiece), None, SPACES)
    assert to_env.columnar_plan() is None
    learner = build_learner(config(learner_connector=UserPiece))
    assert learner.columnar_plan() is None
