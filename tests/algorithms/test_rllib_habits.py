"""What code written for RLlib expects of configs, classes, names and helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import gymnasium as gym
import numpy as np
import pytest
import torch

import rlzmq
from rlzmq import (
    PPO,
    AlgorithmConfig,
    DefaultPPOTorchRLModule,
    EnvToModulePipeline,
    FrameStacking,
    Learner,
    LearnerConnectorPipeline,
    MeanStdFilter,
    ModuleToEnvPipeline,
    MultiAgentEnv,
    NotProvided,
    PPOConfig,
    PPOTorchLearner,
    RLlibCallback,
    RLModuleSpec,
    SingleAgentEpisode,
    TorchLearner,
    TorchRLModule,
    override,
)
from rlzmq.algorithms import rllib_helpers as helpers
from rlzmq.config.model_config import Catalog
from rlzmq.core import names
from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.examples import MultiAgentCartPole
from tests.support.runs import ShortEnv, small


def test_the_only_module_is_found_by_any_name_in_a_run_of_one_agent() -> None:
    with small(num_env_runners=0).build() as algo:
        assert algo.get_module("p0") is algo.get_module() is algo.get_module("default_policy")
    several = small(num_env_runners=0).environment(MultiAgentCartPole, env_config={"num_agents": 2})
    several.multi_agent(policies={"p0"}, policy_mapping_fn=lambda agent_id, episode: "p0")
    with several.build() as algo:
        assert algo.get_module() is algo.get_module("p0")
        with pytest.raises(KeyError, match="No module 'p1'"):
            algo.get_module("p1")


class VPGConfig(AlgorithmConfig):
    """A config class in RLlib's form: settings and defaults are assigned in the constructor."""

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class)
        self.num_episodes_per_train_batch = 10
        self.num_env_runners = 1

    @override(AlgorithmConfig)
    def training(self, *, num_episodes_per_train_batch: Any = NotProvided, **kwargs: Any) -> Self:
        super().training(**kwargs)
        if num_episodes_per_train_batch is not NotProvided:
            self.num_episodes_per_train_batch = num_episodes_per_train_batch
        return self


def test_a_config_class_declares_its_settings_in_its_constructor() -> None:
    config = VPGConfig().training(num_episodes_per_train_batch=3, lr=0.01)
    assert (config.num_episodes_per_train_batch, config.lr, config.num_env_runners) == (3, 0.01, 1)
    assert config.given() == {"num_episodes_per_train_batch": 3, "lr": 0.01}
    assert config.diff() == config.given()
    assert VPGConfig.from_dict(config.to_dict()).num_episodes_per_train_batch == 3
    assert config.copy().num_episodes_per_train_batch == 3


def test_after_the_constructor_a_misspelt_setting_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'num_episodes_per_train_batch'"):
        VPGConfig().num_episode_per_train_batch = 3


def test_what_a_constructor_assigns_is_checked() -> None:
    class Wrong(AlgorithmConfig):
        def __init__(self) -> None:
            super().__init__()
            self.num_env_runners = "two"

    with pytest.raises(ConfigurationError, match="expected int ≥ 0"):
        Wrong()


def test_a_learner_class_may_have_mix_ins_of_the_base() -> None:
    class LogsMore(Learner):
        pass

    class Mixed(TorchLearner, LogsMore):
        pass

    class MixedPPO(PPOTorchLearner, LogsMore):
        pass

    assert issubclass(Mixed, TorchLearner)
    assert issubclass(PPOConfig().get_default_learner_class(), TorchLearner)
    assert PPOConfig().learners(learner_class=MixedPPO).learner_class is MixedPPO
    assert AlgorithmConfig().learner_class is TorchLearner


def test_the_module_spec_is_the_default_one_until_it_is_set() -> None:
    assert PPOConfig().rl_module_spec.module_class is rlzmq.DefaultPPOTorchRLModule
    spec = RLModuleSpec(model_config={"fcnet_hiddens": [3]})
    assert PPOConfig().rl_module(rl_module_spec=spec).rl_module_spec is spec


def test_a_config_answers_what_rllibs_concept_pages_ask_it() -> None:
    env = gym.make("CartPole-v1")
    config = PPOConfig().api_stack(True, True).environment("CartPole-v1").learners(num_gpus_per_learner=0)
    assert (config.enable_rl_module_and_learner, config.enable_env_runner_and_connector_v2) == (True, True)
    assert (config.framework_str, config.is_online, config.is_offline) == ("torch", True, False)
    assert config.env_runners(gym_env_vectorize_mode="SYNC").gym_env_vectorize_mode == "sync"
    config.env_runners(num_env_runners=0, env_to_module_connector=lambda env: FrameStacking(num_frames=4))
    config.training(
        learner_connector=lambda obs, act: FrameStacking(num_frames=4, as_learner_connector=True),
        train_batch_size_per_learner=64,
        minibatch_size=64,
    )
    spaces = {"__env_single__": (env.observation_space, env.action_space)}
    pipelines = [
        config.build_env_to_module_connector(env=env, spaces=None),
        config.build_env_to_module_connector(env=None, spaces=spaces),
    ]
    assert pipelines[0].observation_space == pipelines[1].observation_space
    assert config.get_rl_module_spec(env=env).build().action_space == env.action_space
    with config.build_algo() as algo:
        assert algo.train()["learners"]["default_policy"]["total_loss"]


def test_training_takes_what_learners_takes() -> None:
    config = PPOConfig().training(
        learner_config_dict={"my_setting": 1}, add_default_connectors_to_learner_pipeline=False
    )
    assert config.learner_config_dict == {"my_setting": 1}
    assert not config.add_default_connectors_to_learner_pipeline


def test_callbacks_keep_numbers_in_the_algorithms_counters_and_checkpoints_hold_them(tmp_path: Path) -> None:
    class NextTask(RLlibCallback):
        def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
            algorithm._counters["task"] = 3

        def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
            algorithm._counters["task"] += 1
            algorithm._counters["changes"] += 1

    config = small()
    with config.copy().callbacks(NextTask).build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path / "checkpoint")
    with config.build() as other:
        assert other._counters["task"] == 0
        other._counters["mine"] = 1
        other.restore_from_path(path)
        assert other._counters == {"task": 4, "changes": 1}


class MasksActions(DefaultPPOTorchRLModule):
    """RLlib's form of action masking: `compute_values`, called first, takes the mask out of the batch."""

    def __init__(self, *, observation_space: Any, **kwargs: Any) -> None:
        super().__init__(observation_space=observation_space["observations"], **kwargs)

    def split(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["action_mask"] = batch["obs"].pop("action_mask")
        batch["obs"] = batch["obs"].pop("observations")
        return batch

    def masked(self, outputs: dict[str, Any], mask: torch.Tensor) -> dict[str, Any]:
        return {**outputs, "action_dist_inputs": outputs["action_dist_inputs"] + mask.log().clamp(min=-1e30)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        batch = self.split(batch)
        return self.masked(super()._forward(batch, **kwargs), batch["action_mask"])

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self.masked(super()._forward_train(batch, **kwargs), batch["action_mask"])

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        if isinstance(batch["obs"], dict):
            self.split(batch)
        return super().compute_values(batch, embeddings)


class OnlySecondAction(ShortEnv):
    observation_space = gym.spaces.Dict(
        action_mask=gym.spaces.Box(0, 1, (3,), np.float32),
        observations=gym.spaces.Box(-1, 1, (2,), np.float32),
    )
    action_space = gym.spaces.Discrete(3)

    def observation(self) -> Any:
        return {"action_mask": np.eye(3, dtype=np.float32)[1], "observations": np.zeros(2, np.float32)}

    def reward(self, action: Any) -> float:
        return float(action == 1)


def test_a_module_may_rewrite_its_train_batch_in_compute_values() -> None:
    config = small(env=OnlySecondAction, rl_module_spec=RLModuleSpec(module_class=MasksActions))
    with config.build() as algo:
        assert algo.train()["env_runners"]["episode_return_mean"] == 5.0


class NamesNoAgents(MultiAgentEnv):
    action_space = observation_space = gym.spaces.Discrete(2)


def test_agents_of_an_env_that_names_none_can_be_grouped() -> None:
    pair = gym.spaces.Tuple([gym.spaces.Discrete(2)] * 2)
    grouped = NamesNoAgents().with_agent_groups({"both": [0, 1]}, obs_space=pair, act_space=pair)
    assert grouped.possible_agents == ["both"]
    assert (grouped.observation_space, grouped.action_space) == (pair, pair)


def test_a_learner_tells_which_modules_have_parameters() -> None:
    learner = PPOConfig().environment("CartPole-v1").build_learner()
    assert learner.rl_module_is_compatible(learner.module["default_policy"])
    assert not learner.rl_module_is_compatible(object())


def test_override_finds_a_misspelt_method() -> None:
    with pytest.raises(NameError, match="Did you mean 'compute_losses'"):

        class Misspelt(Learner):
            @override(Learner)
            def compute_los(self) -> None: ...


def test_an_env_loop_gets_the_pipelines_of_a_checkpoint_without_their_pieces(tmp_path: Path) -> None:
    config = PPOConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [16]})
    config.env_runners(env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
    with config.training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1).build() as algo:
        algo.train()
        path = Path(algo.save_to_path(tmp_path / "checkpoint"))
        seen = algo.get_state(components="env_runner")["env_runner"]["env_to_module_connector"][
            "MeanStdFilter"
        ]
    env_to_module = EnvToModulePipeline.from_checkpoint(path / "env_runner" / "env_to_module_connector")
    module_to_env = ModuleToEnvPipeline.from_checkpoint(path)
    module = rlzmq.RLModule.from_checkpoint(path / "learner_group/learner/rl_module/default_policy")
    assert str(env_to_module.get_state()["MeanStdFilter"]) == str(seen)
    episode = SingleAgentEpisode(observations=[np.zeros(4, np.float32)])
    shared: dict[str, Any] = {}
    batch = env_to_module(episodes=[episode], rl_module=module, explore=False, shared_data=shared)
    outputs = module.forward_inference(batch)
    acted = module_to_env(
        batch=outputs, episodes=[episode], rl_module=module, explore=False, shared_data=shared
    )
    assert acted["actions"][0] in (0, 1)
    with pytest.raises(ConfigurationError, match=r"connectors=\["):
        LearnerConnectorPipeline.from_checkpoint(path)


def test_rllibs_own_catalogs_are_fine_and_others_are_refused() -> None:
    assert RLModuleSpec(catalog_class=Catalog) == RLModuleSpec()
    assert TorchRLModule(catalog_class=None) is not None
    with pytest.raises(ConfigurationError, match="no catalogs here"):
        TorchRLModule(catalog_class=dict)


def test_every_name_of_results_is_importable() -> None:
    constants = {name: value for name, value in vars(names).items() if name.isupper()}
    assert len(constants) > 40
    assert all(getattr(rlzmq, name) == value for name, value in constants.items())
    assert rlzmq.COMPONENT_RL_MODULE == "rl_module"
    assert rlzmq.COMPONENT_EVAL_ENV_RUNNER == "eval_env_runner"
    assert rlzmq.NUM_ENV_STEPS_SAMPLED_LIFETIME == "num_env_steps_sampled_lifetime"


def test_one_hots_are_those_of_the_space() -> None:
    discrete, multi = gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([2, 3])
    assert helpers.one_hot(torch.tensor([2, 0]), discrete).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert helpers.one_hot(np.array([[1, 2]]), multi).tolist() == [[0, 1, 0, 0, 1]]
    assert helpers.one_hot(torch.tensor(1), 2).tolist() == [0, 1]


def test_trees_are_converted_and_stacked() -> None:
    tree = {"a": torch.ones(2, requires_grad=True), "b": (np.zeros(1), 3)}
    array = helpers.convert_to_numpy(tree, reduce_type=True)
    assert isinstance(array["a"], np.ndarray)
    assert array["b"][0].dtype == np.float32
    assert helpers.convert_to_torch_tensor(array)["b"][1].item() == 3
    assert rlzmq.batch([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]
    spaces = gym.spaces.Dict({"b": gym.spaces.Discrete(2), "a": gym.spaces.Tuple((gym.spaces.Discrete(4),))})
    assert [space.n for space in helpers.flatten_space(spaces)] == [4, 2]
    np.testing.assert_allclose(helpers.softmax([0.0, np.log(3.0)]), [0.25, 0.75])


def test_paddings_give_the_sizes_of_the_convolution() -> None:
    images = torch.zeros(1, 1, 42, 21)
    padding, size = helpers.same_padding((42, 21), (4, 4), (2, 2))
    layers = torch.nn.Sequential(torch.nn.ZeroPad2d(padding), torch.nn.Conv2d(1, 1, 4, 2))
    assert layers(images).shape[2:] == size == (21, 11)
    assert torch.nn.Conv2d(1, 1, 4, 2)(images).shape[2:] == helpers.valid_padding((42, 21), 4, 2)


def test_networks() -> None:
    network = torch.nn.Linear(3, 2)
    target = helpers.make_target_network(network)
    assert not any(parameter.requires_grad for parameter in target.parameters())
    helpers.normc_initializer(0.5)(network.weight)
    np.testing.assert_allclose(network.weight.norm(dim=1).detach(), 0.5, rtol=1e-5)
    assert helpers.get_activation_fn("relu") is torch.nn.ReLU
    assert helpers.get_activation_fn("swish") is torch.nn.SiLU
    assert helpers.get_activation_fn("linear") is None


def test_a_policy_spec_has_settings_of_its_own() -> None:
    specs = {
        name: rlzmq.PolicySpec(config=PPOConfig.overrides(lr=lr)) for name, lr in (("a", 0.1), ("b", 0.2))
    }
    config = PPOConfig().multi_agent(policies=specs, policy_mapping_fn=lambda agent_id, episode: "a")
    assert [config.get_config_for_module(name).lr for name in "ab"] == [0.1, 0.2]
    assert config.lr == PPOConfig().lr


def test_what_rllibs_scripts_call_on_an_algorithm() -> None:
    config = small().evaluation(evaluation_interval=2, evaluation_duration=1)
    with config.build() as algo:
        results = [algo.train() for _ in range(3)]
        assert ["evaluation" in result for result in results] == [False, True, True]
        assert results[2]["evaluation"] == results[1]["evaluation"], "the last one stays until the next"
        algo.set_weights(algo.get_weights())
        assert Path(algo.save().checkpoint.path).is_dir()
        assert algo.env_runner_group.foreach_env_runner(lambda runner: (x for x in (1, 2))) == [[1, 2]]
        encoder = algo.get_module().encoder
        assert encoder.actor_encoder is not encoder.critic_encoder
        assert type(algo).default_resource_request(config) == {"cpu": 1.0}
        assert algo.learner_group._learner is algo.learner_group.local_learner
        assert algo.learner_group.local_learner.module["default_policy"] is algo.get_module()


class ByHand(PPO):
    """A training step in RLlib's form."""

    def training_step(self) -> None:
        with self.metrics.log_time((names.TIMERS, names.ENV_RUNNER_SAMPLING_TIMER)):
            sampled = self.env_runner_group.foreach_env_runner(
                lambda env_runner: (env_runner.sample(num_episodes=2), env_runner.get_metrics()),
                local_env_runner=self.env_runner_group.num_remote_workers() <= 0,
            )
        episodes = [episode for of_runner, _ in sampled for episode in of_runner]
        self.metrics.aggregate([metrics for _, metrics in sampled], key=names.ENV_RUNNER_RESULTS)
        num_steps = sum(map(len, episodes))
        self.metrics.log_value("sampled_mean_win100", num_steps, reduce="mean", window=100)
        self.metrics.log_value("sampled_ema", num_steps, ema_coeff=0.1)
        with self.metrics.log_time((names.TIMERS, names.LEARNER_UPDATE_TIMER)):
            results = self.learner_group.update(episodes=episodes, timesteps=timesteps_of(self))
        self.metrics.aggregate(results, key=names.LEARNER_RESULTS)
        with self.metrics.log_time((names.TIMERS, names.SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group, inference_only=True
            )


def timesteps_of(algo: Any) -> dict[str, Any]:
    name = names.NUM_ENV_STEPS_SAMPLED_LIFETIME
    return {name: algo.metrics.peek((names.ENV_RUNNER_RESULTS, name))}


def test_a_training_step_in_rllibs_form_counts_as_the_built_in_one() -> None:
    sampling = {"num_env_runners": 2, "num_envs_per_env_runner": 1, "batch_mode": "complete_episodes"}
    config = small(num_learners=1, **sampling)
    config.algo_class = ByHand
    with config.build_algo() as algo:
        for iteration in (1, 2):
            result = algo.train()
            env_runners, learners = result["env_runners"], result["learners"]["__all_modules__"]
            assert (env_runners["num_episodes"], env_runners["num_episodes_lifetime"]) == (4, 4 * iteration)
            assert env_runners["num_env_steps_sampled"] == learners["num_env_steps_trained"] > 0
            assert result["num_env_steps_trained_lifetime"] == result["num_env_steps_sampled_lifetime"]
            assert result["accounting"]["sampled"] == result["accounting"]["trained"]
            assert result["timers"]["synch_weights"] > 0.0
            assert result["sampled_mean_win100"] >= 4
        ask: dict[str, Any] = {"worker_set": algo.env_runner_group, "_uses_new_env_runners": True}
        assert len(rlzmq.synchronous_parallel_sample(**ask, concat=False)) == 2
        episodes, metrics = rlzmq.synchronous_parallel_sample(
            **ask, max_env_steps=64, sample_timeout_s=60.0, _return_metrics=True
        )
        algo.metrics.aggregate(metrics, key=names.ENV_RUNNER_RESULTS)
        passes = {"num_epochs": 2, "minibatch_size": 16, "shuffle_batch_per_epoch": True}
        updated = algo.learner_group.update(episodes=list(episodes), timesteps=timesteps_of(algo), **passes)
        algo.env_runner_group.sync_weights(
            from_worker_or_learner_group=algo.learner_group,
            policies=set(updated[0]) - {"__all_modules__"},
            inference_only=True,
        )
        (num_steps,) = timesteps_of(algo).values()
        algo.env_runner_group.sync_env_runner_states(config=algo.config, env_steps_sampled=num_steps)
        weights = algo.learner_group.get_weights()["default_policy"]
        for acting in algo.env_runner_group.foreach_env_runner(lambda runner: runner.module.get_state()):
            np.testing.assert_equal(acting, {name: weights[name] for name in acting})
