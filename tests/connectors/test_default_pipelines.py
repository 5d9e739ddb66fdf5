"""The pipelines that configs build: order of pieces, user callables of any arity, plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import ACTION_SPACE, OBS_SPACE, PassThrough, call, make_episode

from rlzmq.connectors.defaults import (
    add_estimator,
    add_next_observations,
    build_env_to_module,
    build_learner,
    build_module_to_env,
)
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.connectors.learner import (
    FrameStackingLearner,
    GeneralAdvantageEstimation,
)
from rlzmq.core.errors import ConfigurationError

SPACES = {"__env_single__": (OBS_SPACE, ACTION_SPACE)}


class UserPiece(PassThrough):
    pass


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
    with pytest.raises(ConfigurationError, match=r"config.env_to_module_connector"):
        build_env_to_module(config(env_to_module_connector=value), None, SPACES)


def test_a_callable_with_too_many_arguments_is_an_error_that_shows_it() -> None:
    with pytest.raises(ConfigurationError, match=r"\(env, spaces, device\).*\(a, b, c, d\)"):
        build_env_to_module(config(env_to_module_connector=lambda a, b, c, d: []), None, SPACES)


def test_evaluation_pipelines_do_not_learn_from_samples() -> None:
    evaluating = config(env_to_module_connector=lambda env: MeanStdFilter(), in_evaluation=True)
    pipeline = build_env_to_module(evaluating, None, SPACES)
    call(pipeline, [make_episode(0, numpy=False)])
    assert pipeline.get_state() == {}
