"""Learners on multi-agent episodes: which rows which module gets, on both paths."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.rl_module import SelfSupervisedLossAPI, TorchRLModule
from rlzmq.modules.spec import RLModuleSpec
from tests.learners.cases import ACTION_SPACE, OBSERVATION_SPACE, ppo_config
from tests.learners.test_train_batch import assert_identical, built

AGENTS = ("a", "b", "c")
OBSERVATION_SPACES = gym.spaces.Dict(dict.fromkeys(AGENTS, OBSERVATION_SPACE))
ACTION_SPACES = gym.spaces.Dict(dict.fromkeys(AGENTS, ACTION_SPACE))


def module_of(agent_id: str, episode: Any = None) -> str:
    return "second" if agent_id == "c" else "first"


def multi_agent_learner(**training: Any) -> PPOLearner:
    config = ppo_config(**training).environment(
        observation_space=OBSERVATION_SPACES, action_space=ACTION_SPACES
    )
    config.multi_agent(policies=["first", "second"], policy_mapping_fn=module_of)
    spec = RLModuleSpec(
        observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE, model_config={"fcnet_hiddens": [8]}
    )
    learner = PPOLearner(
        config=config, module_spec=MultiRLModuleSpec(rl_module_specs={"first": spec, "second": spec.copy()})
    )
    learner.build()
    return learner


class Curiosity(TorchRLModule, SelfSupervisedLossAPI):
    def setup(self) -> None:
        self.net = torch.nn.Linear(4, 4)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"prediction": self.net(batch[Columns.OBS])}

    def compute_self_supervised_loss(self, *, batch: Any, fwd_out: Any, **kwargs: Any) -> Any:
        return (fwd_out["prediction"] - batch[Columns.OBS]).square().mean()


class CopyForCuriosity(ConnectorV2):
    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        batch["curiosity"] = dict(batch["default_policy"])
        return batch


class PPOLearnerWithCuriosity(PPOLearner):
    def build(self) -> None:
        super().build()
        self._learner_connector.append(CopyForCuriosity())


def test_a_learner_only_module_beside_the_default_policy_trains_and_never_acts() -> None:
    specs = {
        "default_policy": RLModuleSpec(model_config={"fcnet_hiddens": [4]}),
        "curiosity": RLModuleSpec(module_class=Curiosity, learner_only=True),
    }
    config = (
        ppo_config()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        .learners(learner_class=PPOLearnerWithCuriosity)
    )
    assert not config.is_multi_agent
    with config.build() as algo:
        before = algo.get_module("curiosity").get_state()["net.weight"]
        results = [algo.train()["learners"] for _ in range(2)]
        after = algo.get_module("curiosity").get_state()["net.weight"]
        assert list(algo.env_runner.multi_rl_module) == ["default_policy"]
    assert all({"default_policy", "curiosity"} <= result.keys() for result in results)
    assert results[1]["curiosity"]["total_loss"] < results[0]["curiosity"]["total_loss"]
    assert not np.array_equal(before, after)


def multi_agent_episode(seed: int, num_steps: int, *, terminated: bool = False) -> MultiAgentEpisode:
    """Agent "b" steps every second time only, "c" joins after two steps."""
    rng = np.random.default_rng(seed)

    def present(t: int) -> list[str]:
        return [
            agent
            for agent in AGENTS
            if agent == "a" or (agent == "b" and t % 2 == 0) or (agent == "c" and t > 1)
        ]

    def observations(t: int) -> dict[str, Any]:
        return {agent: rng.normal(size=4).astype(np.float32) for agent in present(t)}

    episode = MultiAgentEpisode(
        f"episode_{seed}",
        observation_space=OBSERVATION_SPACES,
        action_space=ACTION_SPACES,
        agent_to_module_mapping_fn=module_of,
    )
    episode.add_env_reset(observations=observations(0))
    for t in range(num_steps):
        acting = episode.get_agents_to_act()
        last = t == num_steps - 1
        episode.add_env_step(
            observations(t + 1)
            if not (last and terminated)
            else dict.fromkeys(AGENTS, np.zeros(4, np.float32)),
            {agent: int(rng.integers(2)) for agent in sorted(acting)},
            {agent: float(rng.normal()) for agent in sorted(acting)},
            terminateds={"__all__": last and terminated},
            truncateds={"__all__": False},
            extra_model_outputs={
                agent: {
                    Columns.ACTION_DIST_INPUTS: rng.normal(size=2).astype(np.float32),
                    Columns.ACTION_LOGP: np.float32(-rng.random()),
                }
                for agent in sorted(acting)
            },
        )
    return episode.to_numpy()


def multi_agent_episodes() -> list[MultiAgentEpisode]:
    return [multi_agent_episode(0, 7), multi_agent_episode(1, 12, terminated=True), multi_agent_episode(2, 1)]


def test_each_module_is_trained_on_its_agents_steps() -> None:
    learner = multi_agent_learner()
    given = multi_agent_episodes()
    results = learner.update(episodes=given)
    steps = {"first": 0, "second": 0}
    for episode in given:
        for agent_id, agent_episode in episode.agent_episodes.items():
            steps[module_of(agent_id)] += len(agent_episode)
    assert {m: results[m]["num_module_steps_trained"] for m in steps} == steps
    assert results["__all_modules__"]["num_env_steps_trained"] == 20
    assert results["__all_modules__"]["num_module_steps_trained"] == sum(steps.values())
    assert np.isfinite(results["second"]["policy_loss"])


def test_a_module_without_agents_in_the_data_is_left_alone() -> None:
    learner = multi_agent_learner()
    before = learner.module["second"].get_state()
    results = learner.update(episodes=[multi_agent_episode(2, 1)])
    assert "second" not in results
    after = learner.module["second"].get_state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_fused_path_equals_the_per_episode_path() -> None:
    learner = multi_agent_learner()
    given = multi_agent_episodes()
    generic = built(learner, given, fused=False)
    batch = EpisodeBatch.from_episodes(given)
    assert_identical(built(learner, batch, fused=True), generic)
    parts = [EpisodeBatch.from_episodes(given[:1]), EpisodeBatch.from_episodes(given[1:])]
    assert_identical(built(learner, parts, fused=True), generic)
