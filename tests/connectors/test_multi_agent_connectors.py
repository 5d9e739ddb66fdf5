"""Multi-agent pipelines from end to end, with agents that come and go."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from connector_fakes import ValueModule, call

from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.connectors.common import AddObservationsFromEpisodesToBatch
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.defaults import add_estimator, build_env_to_module, build_learner, build_module_to_env
from rlzmq.connectors.env_to_module import (
    MultiAgentObservationPreprocessor,
)
from rlzmq.connectors.learner import GeneralAdvantageEstimation
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode

AGENTS = ("a", "b", "c")
OBS_SPACES = gym.spaces.Dict({agent_id: gym.spaces.Box(-99, 99, (2,)) for agent_id in AGENTS})
ACTION_SPACES = gym.spaces.Dict({agent_id: gym.spaces.Discrete(2) for agent_id in AGENTS})
SPACES = {"__env_single__": (OBS_SPACES, ACTION_SPACES)}


def module_of(agent_id: Any, episode: Any = None, **kwargs: Any) -> str:
    return "m2" if agent_id == "c" else "m1"


def config(**kwargs: Any) -> Any:
    return PPOConfig().update_from_dict({"policies": {"m1", "m2"}, "policy_mapping_fn": module_of, **kwargs})


def observation(value: float) -> np.ndarray:
    return np.array([value, -value], np.float32)


def new_episode(id_: str, **values: float) -> MultiAgentEpisode:
    episode = MultiAgentEpisode(
        id_,
        agent_to_module_mapping_fn=module_of,
        observation_space=OBS_SPACES,
        action_space=ACTION_SPACES,
    )
    episode.add_env_reset(observations={agent_id: observation(v) for agent_id, v in values.items()})
    return episode


def test_observations_reach_modules_and_actions_come_back_to_agents_of_envs() -> None:
    to_module = build_env_to_module(config(), None, SPACES)
    to_env = build_module_to_env(config(), None, SPACES)
    episodes = [new_episode("E", a=1, c=3), new_episode("F", b=2, a=4)]
    shared_data: dict[str, Any] = {}
    modules = {"m1": ValueModule(), "m2": ValueModule()}
    batch = call(to_module, episodes, rl_module=modules, shared_data=shared_data)
    assert batch["m1"]["obs"][:, 0].tolist() == [1, 2, 4]
    assert batch["m2"]["obs"][:, 0].tolist() == [3]
    # action 1 for positive first elements, i.e. for all; then the reverse for m2
    outputs = {
        "m1": {"action_dist_inputs": torch.tensor([[0.0, 9.0]] * 3)},
        "m2": {"action_dist_inputs": torch.tensor([[9.0, 0.0]])},
    }
    to_step = call(to_env, episodes, outputs, rl_module=modules, shared_data=shared_data, explore=False)
    assert to_step["actions_for_env"] == [{"a": 1, "c": 0}, {"b": 1, "a": 1}]
    assert to_step["actions"] == to_step["actions_for_env"]
    assert sorted(to_step["action_logp"][1]) == ["a", "b"]


def test_agents_that_are_done_run_through_user_pieces_but_reach_no_module() -> None:
    seen = []

    class Watch(ConnectorV2):
        def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):  # type: ignore[no-untyped-def,override]
            seen.extend(e.agent_id for e in self.single_agent_episode_iterator(episodes))
            return batch

    pipeline = build_env_to_module(
        config(env_to_module_connector=lambda env, spaces, device: Watch()), None, SPACES
    )
    episode = new_episode("E", a=1, b=2, c=3)
    episode.add_env_step(
        {agent_id: observation(9) for agent_id in AGENTS},
        dict.fromkeys(AGENTS, 0),
        dict.fromkeys(AGENTS, 1.0),
        terminateds={"a": True, "__all__": False},
        truncateds={"c": True},
    )
    shared_data: dict[str, Any] = {}
    batch = call(
        pipeline, [episode], rl_module={"m1": ValueModule(), "m2": ValueModule()}, shared_data=shared_data
    )
    assert sorted(seen) == ["a", "b", "c"]
    assert list(batch) == ["m1"]
    assert shared_data["memorized_map_structure"] == {"m1": [("E", "b")]}


def test_learners_keep_the_data_of_agents_that_are_done() -> None:
    episode = new_episode("E", a=1, c=3)
    episode.add_env_step(
        {"a": observation(2), "c": observation(4)},
        {"a": 0, "c": 1},
        {"a": 1.0, "c": 2.0},
        terminateds={"__all__": True},
        extra_model_outputs={"a": {"action_logp": 0.5}, "c": {"action_logp": 0.25}},
    )
    pipeline = build_learner(config(), OBS_SPACES, ACTION_SPACES)
    add_estimator(pipeline, GeneralAdvantageEstimation(gamma=0.9, lambda_=0.5))
    modules = {"m1": ValueModule(), "m2": ValueModule()}
    batch = pipeline(rl_module=modules, episodes=[episode.to_numpy(), episode])
    assert sorted(batch) == ["m1", "m2"]
    for module_id, reward in (("m1", 1.0), ("m2", 2.0)):
        columns = batch[module_id]
        assert columns["rewards"].tolist() == [reward, 0.0] * 2
        assert columns["loss_mask"].tolist() == [True, False] * 2
        assert columns["terminateds"].tolist() == [True, False] * 2
        assert columns["advantages"].shape == (4,)
    assert len(episode.agent_episodes["a"]) == 1


def test_a_preprocessor_sees_all_agents_at_once() -> None:
    class Others(MultiAgentObservationPreprocessor):
        def preprocess(self, observations: dict[Any, Any], episode: Any) -> dict[Any, Any]:
            return {
                agent_id: np.array([sum(o[0] for o in observations.values())]) for agent_id in observations
            }

    episode = new_episode("E", a=1, b=2)
    call(Others(OBS_SPACES), [episode])
    assert episode.agent_episodes["b"].get_observations(-1).tolist() == [3.0]


def test_the_order_of_agents_is_the_episodes_not_a_sets() -> None:
    episode = new_episode("E", c=3, a=1, b=2)
    batch = call(AddObservationsFromEpisodesToBatch(), [episode])
    assert [key[1] for key in batch["obs"]] == list(episode.agent_episodes)
