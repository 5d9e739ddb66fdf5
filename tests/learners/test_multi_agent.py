"""Learners on multi-agent episodes: which rows which module gets, on both paths, also if modules' data are uneven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import DQNConfig, PPOConfig
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.learners.learner import TorchLearner
from rlzmq.learners.learner_report import LearnerReport
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.rl_module import SelfSupervisedLossAPI, TorchRLModule
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runners.vector_env_runners import MultiAgentEnvRunner
from tests.learners.cases import ppo_config
from tests.learners.test_train_batch import assert_identical, built
from tests.runners.multi_agent_envs import RestlessAgentsEnv
from tests.support.runs import small


def module_of(agent_id: str, episode: Any = None) -> str:
    return "second" if agent_id == "c" else "first"


def config_of(config_class: Any = PPOConfig, **settings: Any) -> Any:
    """Agents are born, wait and die at random."""
    agents: dict[str, Any] = {"policies": ["first", "second"], "policy_mapping_fn": module_of}
    return small(config_class, RestlessAgentsEnv, num_envs_per_env_runner=3, **agents, **settings)


def learner_and_episodes() -> tuple[PPOLearner, list[MultiAgentEpisode]]:
    config = config_of()
    runner = MultiAgentEnvRunner(config=config)
    episodes = [episode.to_numpy() for episode in runner.sample(num_timesteps=60)]
    runner.stop()
    return config.build_learner(), episodes


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


def test_each_module_is_trained_on_its_agents_steps() -> None:
    learner, given = learner_and_episodes()
    results = learner.update(episodes=given)
    steps = {"first": 0, "second": 0}
    for episode in given:
        for agent_id, agent_episode in episode.agent_episodes.items():
            steps[module_of(agent_id)] += len(agent_episode)
    assert {m: results[m]["num_module_steps_trained"] for m in steps} == steps
    assert results["__all_modules__"]["num_env_steps_trained"] == sum(map(len, given))
    assert results["__all_modules__"]["num_module_steps_trained"] == sum(steps.values())
    assert np.isfinite(results["second"]["policy_loss"])


def test_a_module_has_its_own_gamma_and_no_settings_that_all_have_in_common() -> None:
    def of_second(**settings: Any) -> Any:
        return {"algorithm_config_overrides_per_module": {"second": settings}}

    learner, given = learner_and_episodes()
    others = [config_of(**made).build_learner() for made in (of_second(gamma=0.5), {"gamma": 0.5})]
    plain, mixed, half = (one.prepare(given).columns for one in (learner, *others))
    for m, expected in (("first", plain), ("second", half)):
        assert torch.equal(mixed[m][Columns.VALUE_TARGETS], expected[m][Columns.VALUE_TARGETS])
    with pytest.raises(ConfigurationError, match=r"'second'\]: num_epochs=3 has no effect.* the same, 1"):
        config_of(**of_second(num_epochs=3)).validate()
    replay = config_of(DQNConfig, **of_second(gamma=0.5))
    assert replay.build_learner().source.gammas == {"first": 0.99, "second": 0.5}


def test_an_epoch_has_fewer_minibatches_of_a_module_with_fewer_rows() -> None:
    report = LearnerReport()
    for number in range(12):  # three epochs
        for m in ("first", "second") if number % 4 == 3 else ("first",):
            report.num_steps_due[m] += 1
            report.log(m, {"kl": float(number)})
    assert report.mean("kl", 4) == {"first": (8 + 9 + 10 + 11) / 4, "second": 11.0}
    assert report.means(4) == {m: {"kl": kl} for m, kl in report.mean("kl", 4).items()}


def test_target_networks_follow_each_module_that_was_trained_since_they_last_did() -> None:
    learner: Any = config_of(DQNConfig, tau=0.5).build_learner()
    pairs = {m: module.get_target_network_pairs()[0] for m, module in learner.module.items()}
    for trained, num_env_steps in [("first", 5), ("second", 20), ("second", 40)]:
        for main, _ in pairs.values():
            next(main.parameters()).data += 1.0
        learner.trained_module_ids = [trained]
        learner.update_targets_if_due(num_env_steps, 10)
    for m, behind in (("first", 2.0), ("second", 1.0)):
        main, target = (next(network.parameters()).data for network in pairs[m])
        assert torch.allclose(main - target, torch.tensor(behind))


def test_a_column_beside_the_modules_is_an_error() -> None:
    class AddsBonus(ConnectorV2):
        def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            batch["bonus"] = torch.zeros(3)
            return batch

    learner, given = learner_and_episodes()
    learner._learner_connector.append(AddsBonus())
    with pytest.raises(ConfigurationError, match="'bonus' beside 'first', 'second'"):
        learner.update(episodes=given)


def test_the_fused_path_equals_the_per_episode_path() -> None:
    learner, given = learner_and_episodes()
    generic = built(learner, given, fused=False)
    batch = EpisodeBatch.from_episodes(given)
    assert_identical(built(learner, batch, fused=True), generic)
    parts = [EpisodeBatch.from_episodes(given[:1]), EpisodeBatch.from_episodes(given[1:])]
    assert_identical(built(learner, parts, fused=True), generic)


# -- uneven data ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_learners_of_two_recurrent_modules_train_on_uneven_data(tmp_path: Path) -> None:
    config = small(
        env=RestlessAgentsEnv,
        env_config={"p_birth": 0.0, "p_end": 0.1},
        num_env_runners=1,
        num_envs_per_env_runner=1,
        num_learners=4,
        policies={"first", "second"},
        policy_mapping_fn=lambda agent_id, episode: "second" if agent_id == "d" else "first",
        model_config={"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 5},
        train_batch_size_per_learner=50,
        minibatch_size=16,
        num_epochs=2,
        seed=3,
    )
    with config.build() as algo:
        before = algo.get_weights()
        for _ in range(4):
            result = algo.train()
        after = algo.get_weights()
    assert result["accounting"]["trained"] >= 4 * 200
    for module_id in ("first", "second"):
        assert any((after[module_id][name] != before[module_id][name]).any() for name in before[module_id])
        assert np.isfinite(result["learners"][module_id]["policy_loss"])
    steps = {mid: result["learners"][mid]["num_module_steps_trained"] for mid in ("first", "second")}
    assert 0 < 6 * steps["second"] < steps["first"]


class Layer(TorchRLModule):
    def setup(self) -> None:
        self.net = torch.nn.Linear(4, 4)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.OBS: self.net(batch[Columns.OBS])}


class OnTrunk(MultiRLModule):
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {m: self[m].forward_train(self["trunk"].forward_train(batch[m])) for m in batch}


class Squares(TorchLearner):
    def compute_loss_for_module(self, *, fwd_out: Any, **kwargs: Any) -> torch.Tensor:
        return fwd_out[Columns.OBS].square().mean()  # type: ignore[no-any-return]


def test_a_module_that_others_share_is_trained_with_them() -> None:
    space = gym.spaces.Box(-1, 1, (4,))
    layer = RLModuleSpec(module_class=Layer, observation_space=space, action_space=space)
    spec = MultiRLModuleSpec(
        multi_rl_module_class=OnTrunk, rl_module_specs=dict.fromkeys(("first", "second", "trunk"), layer)
    )
    learner: Any = Squares(config=small(policies=["first", "second"]), module_spec=spec)
    learner.build()
    before = learner.module.get_state()
    before = {m: {name: np.array(value) for name, value in of.items()} for m, of in before.items()}
    learner.update(batch={"first": {Columns.OBS: torch.ones(5, 4)}})
    after = learner.module.get_state()
    moved = [m for m in after if any(not np.array_equal(after[m][n], before[m][n]) for n in after[m])]
    assert sorted(moved) == ["first", "trunk"]
