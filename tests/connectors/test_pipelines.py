"""The base class and pipelines: items, names, edits, spaces, states, errors, timers, explain."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from connector_fakes import ACTION_SPACE, OBS_SPACE, PassThrough, ValueModule, call, make_episode

from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.connectors.common import AddObservationsFromEpisodesToBatch, BatchIndividualItems, NumpyToTensor
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.env_to_module import (
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PrevActionsPrevRewards,
    SingleAgentObservationPreprocessor,
    WriteObservationsToEpisodes,
)
from rlzmq.connectors.module_to_env import NormalizeAndClipActions
from rlzmq.connectors.pipelines import (
    ConnectorPipelineV2,
    EnvToModulePipeline,
    LearnerConnectorPipeline,
)
from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.examples import MultiAgentCartPole
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.runners.vector_env_runners import make_env_runner


class Tag(ConnectorV2):
    """Appends its name to a list in the batch."""

    def __init__(self, name: str = "tag", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name = name

    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):  # type: ignore[no-untyped-def,override]
        batch.setdefault("order", []).append(self.name)
        return batch


class OtherTag(Tag):
    pass


class Forgetful(ConnectorV2):
    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):  # type: ignore[no-untyped-def,override]
        batch["x"] = 1


class Failing(ConnectorV2):
    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):  # type: ignore[no-untyped-def,override]
        raise RuntimeError("boom")


def order(pipeline: ConnectorPipelineV2) -> list[str]:
    return call(pipeline, [])["order"]  # type: ignore[no-any-return]


def test_pieces_are_called_in_order_and_edits_take_effect() -> None:
    pipeline = ConnectorPipelineV2(connectors=[Tag("b")])
    pipeline.prepend(Tag("a"))
    pipeline.append(OtherTag("d"))
    pipeline.insert_before("OtherTag", Tag("c"))
    pipeline.insert_after(OtherTag, Tag("e"))
    assert order(pipeline) == ["a", "b", "c", "d", "e"]
    pipeline.remove("Tag_3")
    pipeline.remove(OtherTag)
    assert order(pipeline) == ["a", "b", "e"]
    assert len(pipeline) == 3
    assert pipeline.piece_names == ["Tag", "Tag_2", "Tag_3"]


def test_indexing_by_position_name_slice_and_class() -> None:
    first, second, third = Tag("a"), OtherTag("b"), MeanStdFilter()
    pipeline = ConnectorPipelineV2(connectors=[first, second, third])
    assert pipeline[0] is first
    assert pipeline[-1] is third
    assert pipeline["OtherTag"] is second
    assert pipeline[Tag] == [first, second]
    assert pipeline[1:] == [second, third]
    assert "Tag" in pipeline
    assert NumpyToTensor not in pipeline
    for look_up in (pipeline.__getitem__, pipeline.remove):
        with pytest.raises(ValueError, match="Did you mean 'OtherTag'"):
            look_up("OtherTga")
    with pytest.raises(IndexError):
        pipeline[5]


def test_something_that_is_no_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="forget the parentheses"):
        ConnectorPipelineV2(connectors=[Tag])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected a ConnectorV2 piece"):
        ConnectorPipelineV2().append(lambda batch: batch)  # type: ignore[arg-type]


def test_a_piece_that_returns_no_dict_is_named_at_once() -> None:
    pipeline = EnvToModulePipeline(connectors=[Tag("a"), Forgetful(), Tag("b")])
    with pytest.raises(ValueError, match=r"'Forgetful' \(number 2 of 3"):
        call(pipeline, [])


def test_an_error_in_a_piece_carries_a_note_that_names_it() -> None:
    pipeline = ConnectorPipelineV2(connectors=[ConnectorPipelineV2(connectors=[Failing()])])
    with pytest.raises(RuntimeError, match="boom") as caught:
        call(pipeline, [])
    assert any("Failing" in note for note in caught.value.__notes__)
    pieces = [PassThrough(), NormalizeAndClipActions(OBS_SPACE, gym.spaces.Box(-1.0, 1.0, (1,)))]
    with pytest.raises(KeyError, match="actions") as lost:  # no piece drops it, it was never there
        call(ConnectorPipelineV2(connectors=pieces), [])
    assert "'NormalizeAndClipActions'" in lost.value.__notes__[0]


class Drops(ConnectorV2):
    """A piece that returns its own column only."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        return {name: batch[name] for name in batch.keys() & {"mine"}}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("pipeline", "before", "column"),
    [
        ("module_to_env", "NormalizeAndClipActions", "actions"),
        ("module_to_env", None, "actions"),
        ("env_to_module", None, "obs"),
    ],
)
def test_a_piece_that_drops_a_column_is_named(
    pipeline: str, before: str | None, column: str, several: bool
) -> None:
    config = PPOConfig().environment("CartPole-v1")
    if several:
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent_id, episode, **kwargs: "p")
    with make_env_runner(config, 0) as runner:
        edited = getattr(runner, pipeline)
        for piece in (PassThrough(), Drops(), PassThrough()):
            edited.append(piece) if before is None else edited.insert_before(before, piece)
        with pytest.raises(ConfigurationError, match=rf"'Drops'.* without the column '{column}'"):
            runner.sample(num_timesteps=4)


def test_spaces_are_propagated_after_every_edit() -> None:
    pipeline = EnvToModulePipeline(OBS_SPACE, ACTION_SPACE, connectors=[])
    assert pipeline.observation_space == OBS_SPACE
    pipeline.append(FrameStackingEnvToModule(num_frames=3))
    assert pipeline.observation_space is not None
    assert pipeline.observation_space.shape == (6,)
    pipeline.prepend(FlattenObservations())
    pipeline.input_observation_space = gym.spaces.Discrete(5)
    assert pipeline.observation_space.shape == (15,)
    pipeline.remove(FrameStackingEnvToModule)
    assert pipeline.observation_space.shape == (5,)
    assert pipeline[0].observation_space is not None
    assert pipeline.action_space == ACTION_SPACE


def test_an_edit_of_a_nested_pipeline_reaches_the_spaces_of_all_around_it() -> None:
    space = gym.spaces.Dict({"x": gym.spaces.Discrete(2), "y": OBS_SPACE})
    for copied in (lambda p: p, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))):
        middle = EnvToModulePipeline(connectors=[EnvToModulePipeline(connectors=[])])
        outer = copied(EnvToModulePipeline(space, ACTION_SPACE, connectors=[middle, FlattenObservations()]))
        inner = outer[0][0]
        inner.append(FlattenObservations(keys_to_remove=["x"]))
        assert outer.observation_space.shape == (2,)
        assert outer[-1].input_observation_space.shape == (2,)
        outer.remove(outer[0])
        assert outer.observation_space.shape == (4,)


def test_states_are_merged_by_piece_and_not_by_position() -> None:
    """RLlib pairs states with pieces by position: a stateless piece in front loses the filter's state."""

    def pipeline() -> ConnectorPipelineV2:
        return ConnectorPipelineV2(
            OBS_SPACE, ACTION_SPACE, connectors=[FlattenObservations(), MeanStdFilter()]
        )

    runners = [pipeline(), pipeline()]
    for offset, runner in enumerate(runners):
        call(runner, [make_episode(0, numpy=False, offset=10.0 * offset) for _ in range(4)])
    merged = pipeline().merge_states([runner.get_state() for runner in runners])
    base = merged["MeanStdFilter"]["default_agent"]["base"]
    assert base["num"] == 8
    np.testing.assert_allclose(base["means"][0], [5.0, 0.0])


def test_explain_shows_the_batch_after_each_piece_and_changes_nothing(capsys: Any) -> None:
    pipeline = EnvToModulePipeline(
        OBS_SPACE,
        ACTION_SPACE,
        connectors=[
            MeanStdFilter(),
            AddObservationsFromEpisodesToBatch(),
            BatchIndividualItems(),
            NumpyToTensor(),
        ],
    )
    episodes = [make_episode(0, numpy=False, offset=5.0), make_episode(0, numpy=False)]
    shared_data: dict[str, Any] = {}
    text = pipeline.explain(episodes=episodes, explore=True, shared_data=shared_data)
    assert capsys.readouterr().out.strip() == text
    assert [line for line in text.splitlines() if line.startswith("after")] == [
        "after 1. MeanStdFilter:",
        "after 2. AddObservationsFromEpisodesToBatch:",
        "after 3. BatchIndividualItems:",
        "after 4. NumpyToTensor:",
    ]
    assert "obs: ndarray [2, 2] float32" in text
    assert "obs: tensor [2, 2] float32" in text
    assert pipeline.get_state() == {}
    assert episodes[0].get_observations(-1)[0] == 5.0
    assert shared_data == {}


def test_learner_pipelines_refuse_pieces_that_handle_last_observations_only() -> None:
    class Preprocess(SingleAgentObservationPreprocessor):
        def preprocess(self, observation: Any, episode: Any) -> Any:
            return observation

    pieces = [
        FlattenObservations(),
        MeanStdFilter(),
        PrevActionsPrevRewards(),
        FrameStackingEnvToModule(num_frames=2),
        WriteObservationsToEpisodes(),
        Preprocess(),
    ]
    for piece in pieces:
        nested = ConnectorPipelineV2(connectors=[piece])
        with pytest.raises(ConfigurationError, match=f"{type(piece).__name__} handles"):
            LearnerConnectorPipeline(OBS_SPACE, ACTION_SPACE, connectors=[nested])
    pipeline = LearnerConnectorPipeline(
        OBS_SPACE, ACTION_SPACE, connectors=[FlattenObservations(as_learner_connector=True)]
    )
    with pytest.raises(ConfigurationError, match="as_learner_connector=True"):
        pipeline.append(FlattenObservations())
    assert len(pipeline) == 1


def test_the_learner_pipeline_leaves_the_callers_episodes_alone() -> None:
    from rlzmq.connectors.learner import AddOneTsToEpisodesAndTruncate

    class Negate(ConnectorV2):
        def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):  # type: ignore[no-untyped-def,override]
            for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
                episode.set_rewards(new_data=-episode.get_rewards())
            return batch

    episode = make_episode(3)
    pipeline = LearnerConnectorPipeline(connectors=[AddOneTsToEpisodesAndTruncate(), Negate()])
    pipeline(rl_module=ValueModule(), episodes=[episode])
    pipeline(rl_module=ValueModule(), episodes=[episode])
    assert (len(episode), episode.is_truncated) == (3, False)
    assert episode.get_rewards().tolist() == [1.0, 2.0, 3.0]


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


def test_items_of_an_agent_are_collected_by_multi_agent_episode_agent_and_module() -> None:
    batch: dict[str, Any] = {}
    in_episode = SingleAgentEpisode(id_="S", agent_id="A", module_id="M", multi_agent_episode_id="E")
    alone = SingleAgentEpisode(id_="S", agent_id="A", module_id="M")
    ConnectorV2.add_batch_item(batch, "c", 5, in_episode)
    ConnectorV2.add_batch_item(batch, "c", 6, alone)
    assert batch == {"c": {("E", "A", "M"): [5], ("S", "A", "M"): [6]}}


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


def test_a_piece_need_not_call_the_constructor_of_its_base() -> None:
    class Own(ConnectorV2):
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"x": batch["x"] * self.factor}

    pipeline = ConnectorPipelineV2(OBS_SPACE, ACTION_SPACE, connectors=[Own(2.0)])
    assert pipeline(rl_module=None, batch={"x": 3.0}, episodes=[]) == {"x": 6.0}
    assert pipeline.observation_space is OBS_SPACE


def test_spaces_may_depend_on_attributes_set_after_super_init() -> None:
    piece = LateAttributes(OBS_SPACE, size=5)
    assert piece.observation_space is not None
    assert piece.observation_space.shape == (5,)
