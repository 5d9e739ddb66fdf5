"""The pipelines that configs build: order of pieces, user callables; each order either trains or is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from connector_fakes import ACTION_SPACE, OBS_SPACE, PassThrough, call, make_episode

from rlzmq import (
    Columns,
    ConfigurationError,
    ConnectorV2,
    FlattenObservations,
    FrameStackingEnvToModule,
    FrameStackingLearner,
    MeanStdFilter,
    PPOConfig,
    PrevActionsPrevRewards,
    SingleAgentObservationPreprocessor,
    WriteObservationsToEpisodes,
)
from rlzmq.connectors.common import AddObservationsFromEpisodesToBatch
from rlzmq.connectors.defaults import (
    add_estimator,
    add_next_observations,
    build_env_to_module,
    build_learner,
    build_module_to_env,
)
from rlzmq.connectors.learner import GeneralAdvantageEstimation
from rlzmq.envs.examples import MultiAgentCartPole

SPACES = {"__env_single__": (OBS_SPACE, ACTION_SPACE)}


class UserPiece(PassThrough):
    pass


def config(**kwargs: Any) -> Any:
    return PPOConfig().update_from_dict(kwargs)


def multi(**kwargs: Any) -> Any:
    return config(policies={"m"}, policy_mapping_fn=lambda a, e, **kw: "m", **kwargs)


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


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (lambda env: 5, "got 5"),
        (lambda env: [UserPiece], r"got \[<class"),
        ("UserPiece", ""),
        (lambda a, b, c, d: [], r"\(env, spaces, device\).*\(a, b, c, d\)"),
        (lambda: MeanStdFilter(multi_agent=True), "for one agent. Set multi_agent=False"),
    ],
)
def test_something_else_than_pieces_is_an_error_that_names_the_setting(value: Any, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=f"config.env_to_module_connector.*{wanted}"):
        build_env_to_module(config(env_to_module_connector=value), None, SPACES)


def test_evaluation_pipelines_do_not_learn_from_samples() -> None:
    evaluating = config(env_to_module_connector=lambda env: MeanStdFilter(), in_evaluation=True)
    pipeline = build_env_to_module(evaluating, None, SPACES)
    call(pipeline, [make_episode(0, numpy=False)])
    assert pipeline.get_state() == {}


class Halved(SingleAgentObservationPreprocessor):
    def preprocess(self, observation: Any, episode: Any) -> Any:
        return np.asarray(observation, np.float32) / 2


PIECES: dict[str, Callable[[bool], ConnectorV2]] = {
    "filter": lambda multi: MeanStdFilter(multi_agent=multi),
    "flatten": lambda multi: FlattenObservations(multi_agent=multi),
    "previous": lambda multi: PrevActionsPrevRewards(multi_agent=multi),
    "stack": lambda multi: FrameStackingEnvToModule(num_frames=2, multi_agent=multi),
    "write": lambda multi: WriteObservationsToEpisodes(),
}
REFUSED = {
    ("stack", "stack"): "is there twice",
    ("stack", "filter"): "MeanStdFilter comes after FrameStackingEnvToModule",
    ("stack", "flatten"): "FlattenObservations comes after FrameStackingEnvToModule",
    ("stack", "previous"): "PrevActionsPrevRewards comes after FrameStackingEnvToModule",
    ("previous", "stack"): "expected a Box with at least one axis",
    **{pair: "no piece before it adds any" for pair in itertools.product(PIECES, repeat=2) if "write" in pair},
}  # fmt: skip
REFUSED[("stack", "write")] = "would store stacked observations"


def config_of(pieces: Callable[[], Sequence[ConnectorV2]], multi_agent: bool, is_stacked: bool) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1")
    if multi_agent:
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent_id, episode, **_: "p")
    config.env_runners(env_to_module_connector=lambda: list(pieces()))
    config.training(train_batch_size_per_learner=20, minibatch_size=10, num_epochs=1)
    if is_stacked:
        config.training(learner_connector=lambda: FrameStackingLearner(num_frames=2, multi_agent=multi_agent))
    return config.rl_module(model_config={"fcnet_hiddens": [4]})


PAIRS = list(itertools.product(PIECES, repeat=2))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_pairs_of_env_to_module_pieces(names: tuple[str, str]) -> None:
    multi_agent = PAIRS.index(names) % 2 == 0
    wanted = REFUSED.get(names)
    chosen = list(names)
    if wanted is None and names[1] == "previous":
        chosen.append("flatten")  # its result is a Dict, for which there is no default model
    config = config_of(lambda: [PIECES[name](multi_agent) for name in chosen], multi_agent, "stack" in names)
    if wanted is not None:
        with pytest.raises(ConfigurationError, match=re.escape(wanted)):
            config.build()
        return
    with config.build() as algo:
        assert algo.train()["num_env_steps_trained_lifetime"] >= 20


def test_a_custom_preprocessor_after_frames_were_stacked_is_refused() -> None:
    config = config_of(lambda: [FrameStackingEnvToModule(num_frames=2), Halved()], False, True)
    with pytest.raises(ConfigurationError, match="what Halved makes of them"):
        config.build()


def test_pieces_that_write_observations_of_the_batch_may_follow_custom_ones() -> None:
    class AddsHalved(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            for episode in self.single_agent_episode_iterator(episodes):
                self.add_batch_item(batch, Columns.OBS, episode.get_observations(-1) / 2, episode)
            return batch

    with config_of(lambda: [AddsHalved(), WriteObservationsToEpisodes()], False, False).build() as algo:
        algo.train()
    config = config_of(
        lambda: [AddObservationsFromEpisodesToBatch(), FrameStackingEnvToModule(num_frames=2)], False, True
    )
    with pytest.raises(ConfigurationError, match="has added the single frames already"):
        config.build()


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        (lambda: [FrameStackingLearner(num_frames=2)] * 2, "is there twice"),
        (
            lambda: [FrameStackingLearner(num_frames=2), FlattenObservations(as_learner_connector=True)],
            "cannot both be in a learner pipeline",
        ),
    ],
)
def test_learner_pieces_that_exclude_each_other(pieces: Any, wanted: str) -> None:
    config = config_of(lambda: [FrameStackingEnvToModule(num_frames=2)], False, False)
    config.training(learner_connector=lambda: pieces())
    with pytest.raises(ConfigurationError, match=wanted):
        config.build()
