"""AlgorithmConfig: checked setters, freezing, dict and TOML forms, what fits together."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import pytest

from rlzmq import AlgorithmConfig, ConfigurationError, DefaultModelConfig, PPOConfig


def cartpole() -> PPOConfig:
    return PPOConfig().environment("CartPole-v1")


def test_setters_chain_and_read_back() -> None:
    config = (
        cartpole()
        .env_runners(num_env_runners=3, num_envs_per_env_runner=4)
        .training(lr=1, clip_param=0.2, train_batch_size_per_learner=500)
        .learners(num_learners=2)
    )
    assert (config.env, config.num_env_runners, config.clip_param) == ("CartPole-v1", 3, 0.2)
    assert config.lr == 1.0
    assert config.train_batch_size_per_learner == 500
    assert config.total_train_batch_size == 1000
    assert config["lr"] == config.get("lr") == 1.0
    assert "lr" in config
    assert "lrr" not in config


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.training(lrr=1), "Did you mean 'lr'"),
        (lambda c: c.training(num_learners=1), r"is set with \.learners\(\)"),
        (lambda c: c.env_runners(num_env_runer=1), "Did you mean 'num_env_runners'"),
        (lambda c: c.callbacks(on_train_resul=print), "Did you mean 'on_train_result'"),
    ],
)
def test_unknown_keys_name_the_closest(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(cartpole())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.env_runners(num_env_runners=-1), "num_env_runners: expected int ≥ 0, got -1"),
        (lambda c: c.env_runners(num_env_runners=True), "a bool"),
        (lambda c: c.training(gamma=1.5), "gamma: expected float ≥ 0.0 and ≤ 1.0"),
        (lambda c: c.training(grad_clip_by="norms"), "one of 'value', 'norm', 'global_norm'"),
        (lambda c: c.update_from_dict({"lrr": 1}), "Did you mean 'lr'"),
        (lambda c: c.from_toml("[training]\nlrr = 1\n"), "Did you mean 'lr'"),
        (lambda c: c.from_toml("[trainin]\nlr = 1\n"), "Did you mean 'training'"),
        (lambda c: c.from_toml("lr = = 1\n"), "no valid TOML"),
    ],
)
def test_wrong_values_say_expected_and_actual(call: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        call(cartpole())


def test_assignment_is_checked_too() -> None:
    config = cartpole()
    config.lr = 0.5
    assert config.lr == 0.5
    with pytest.raises(AttributeError, match="Did you mean 'lr'"):
        config.lrr = 3
    with pytest.raises(AttributeError, match="Did you mean 'gamma'"):
        _ = config.gama


def test_none_is_a_value_and_not_given_is_not() -> None:
    config = cartpole().training(grad_clip=1.0).training(lr=0.1)
    assert config.grad_clip == 1.0
    assert config.training(grad_clip=None).grad_clip is None


def test_a_frozen_config_refuses_and_its_copy_does_not() -> None:
    config = cartpole()
    config.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        config.training(lr=1.0)
    changed = config.copy(copy_frozen=False).training(lr=1.0)
    assert (config.lr, changed.lr) == (5e-5, 1.0)


def test_copies_do_not_share_containers() -> None:
    config = cartpole().environment(env_config={"a": [1]})
    other = copy.deepcopy(config)
    config.copy().env_config["a"].append(2)
    other.env_config["a"].append(3)
    assert config.env_config == {"a": [1]}


def test_dict_and_toml_come_back_equal() -> None:
    config = (
        cartpole()
        .environment(env_config={"size": 3, "name": 'quo"te'})
        .training(lr=[(0, 0.1), (1000, 0.01)], clip_param=0.1, vf_clip_param=None)
        .rl_module(model_config={"fcnet_hiddens": [32, 32]})
    )
    assert PPOConfig.from_toml(config.to_toml()).diff() == config.diff()
    assert PPOConfig.from_dict(config.to_dict()).diff() == config.diff()
    assert PPOConfig.from_state(config.get_state()).diff() == config.diff()


def test_functions_travel_by_name_and_lambdas_are_refused_by_setting() -> None:
    named = cartpole().callbacks(on_train_result=gym.make)
    assert PPOConfig.from_state(named.get_state()).callbacks_hooks == {"on_train_result": [gym.make]}
    with pytest.raises(ConfigurationError, match=r"config\.policy_mapping_fn="):
        cartpole().multi_agent(policy_mapping_fn=lambda a, e: "p").get_state()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (lambda: PPOConfig(), "env is None"),
        (lambda: cartpole().learners(num_learners=3), "Nearest that can: 3999 or 4002"),
        (lambda: cartpole().training(train_batch_size_per_learner=100), "Largest valid: 100"),
        (lambda: cartpole().env_runners(rollout_fragment_length=5000), "Largest that fits: 2000, or 'auto'"),
        (lambda: cartpole().training(lr=[(5, 0.1), (9, 0.0)]), "begins at 0"),
        (lambda: cartpole().multi_agent(policies={"a", "b"}), "policy_mapping_fn is None"),
        (
            lambda: cartpole().multi_agent(
                policies=["a", "b"], policy_mapping_fn=lambda a, e: "a", policies_to_train=["aa"]
            ),
            "Did you mean 'a'",
        ),
    ],
)
def test_settings_that_do_not_fit_together(config: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        config().validate()


def test_auto_fragments_spread_the_remainder() -> None:
    config = cartpole().env_runners(num_env_runners=4, num_envs_per_env_runner=3)
    config.training(train_batch_size_per_learner=2500)
    assert [config.get_rollout_fragment_length(i) for i in (1, 2, 3, 4)] == [209, 209, 208, 208]


def test_model_config_takes_a_dict_or_a_default_model_config() -> None:
    config = cartpole().rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[8]))
    assert config.model_config["fcnet_hiddens"] == [8]
    config = cartpole().rl_module(model_config={"fcnet_hiddens": [4], "own": 1})
    assert config.model_config == {"vf_share_layers": False, "fcnet_hiddens": [4], "own": 1}


def test_multi_agent_is_more_or_other_than_the_default_policy() -> None:
    assert not cartpole().is_multi_agent
    assert cartpole().multi_agent(policies={"p"}, policy_mapping_fn=lambda a, e: "p").is_multi_agent


def test_overrides_check_names() -> None:
    assert PPOConfig.overrides(lr=1.0) == {"lr": 1.0}
    with pytest.raises(KeyError, match="Did you mean 'lr'"):
        PPOConfig.overrides(lrr=1.0)


def test_per_module_overrides() -> None:
    config = cartpole().multi_agent(
        policies=["a", "b"],
        policy_mapping_fn=lambda a, e: "a",
        algorithm_config_overrides_per_module={"b": PPOConfig.overrides(lr=0.5)},
    )
    assert config.get_config_for_module("a").lr == 5e-5
    assert config.get_config_for_module("b").lr == 0.5


def test_a_base_config_names_no_algorithm() -> None:
    with pytest.raises(ConfigurationError, match="names no algorithm"):
        AlgorithmConfig().environment("CartPole-v1").build()


def test_spaces_and_module_spec() -> None:
    spec = cartpole().get_multi_rl_module_spec(env=gym.make("CartPole-v1"))
    assert list(spec.rl_module_specs) == ["default_policy"]
    assert spec.rl_module_specs["default_policy"].action_space == gym.spaces.Discrete(2)
