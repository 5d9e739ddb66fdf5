"""AlgorithmConfig: checked setters, freezing, dict and TOML forms, what fits together."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest

from rlzmq import (
    ConfigurationError,
    DefaultModelConfig,
    PPOConfig,
    RLModuleSpec,
)
from rlzmq.driver.process_config import with_module
from rlzmq.envs.examples import MultiAgentCartPole


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
        (lambda c: c.training(num_learners=1), r"Instead: \.learners\(num_learners=…\)"),
        (lambda c: c.env_runners(num_env_runer=1), "Did you mean 'num_env_runners'"),
        (lambda c: c.callbacks(on_train_resul=print), "Did you mean 'on_train_result'"),
    ],
)
def test_unknown_keys_name_the_closest(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(cartpole())


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


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(np.array_equal(a, b))


FREE = {
    "size": (3, (4, 5)), "map": {1: "a", (2, 3): [("b",)]}, "set": {"x", "y"}, "frozen": frozenset({1}),
    "user": "@bob", "at": "@", "twice": "@@x", "__tuple__": 1, "tagged": {"__tuple__": [1]}, "none": None,
    "bytes": b"\x00", "scalar": np.float32(0.5), "array": np.arange(3), "mode": gym.VectorizeMode.SYNC,
    "box": gym.spaces.Box(0.0, 1.0, (2,)), "make": gym.make,
}  # fmt: skip


def test_free_dicts_keep_their_types_as_plain_data() -> None:
    config = (
        cartpole()
        .environment(env_config=FREE)
        .evaluation(evaluation_config={"env_config": FREE})
        .rl_module(rl_module_spec=RLModuleSpec(model_config=FREE))
    )
    state = msgpack.unpackb(msgpack.packb(config.get_state()), strict_map_key=False)
    assert state == config.get_state()
    with pytest.raises(ConfigurationError, match="not trusted"):
        PPOConfig.from_state(state)
    back = PPOConfig.from_state(state, trust=[__name__, "gymnasium"])
    assert same(back.env_config, FREE)
    assert same(back.evaluation_config, {"env_config": FREE})
    assert same(back.rl_module_spec.model_config, FREE)
    assert json.loads(json.dumps(state)) == state
    in_toml = {key: value for key, value in FREE.items() if value is not None}
    text = cartpole().environment(env_config=in_toml).to_toml()
    assert same(PPOConfig.from_toml(text).env_config, in_toml)


@pytest.mark.parametrize("value", [object(), functools.partial(print), gym.vector.utils, {1}.add])
def test_what_has_no_plain_form_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.env_config\['it'\]="):
        cartpole().environment(env_config={"it": value}).get_state()


def test_texts_are_code_in_states_and_files_only() -> None:
    config = PPOConfig.from_dict(cartpole().environment(env_config={"user": "@bob"}).to_dict())
    assert config.env_config == {"user": "@bob"}
    config.evaluation(evaluation_config={"env_config": {"user": "@os:remove"}})
    assert config.get_evaluation_config_object().env_config == {"user": "@os:remove"}
    assert PPOConfig.from_toml('env_config = {make = "@gymnasium:make"}').env_config == {"make": gym.make}
    with pytest.raises(ConfigurationError, match="'bob'"):
        PPOConfig.from_state({"env_config": {"user": "@bob"}})


@pytest.mark.parametrize(
    "form", [{"__tuple__": 3}, {"__dict__": [1]}, {"__set__": [[1]]}, {"__array__": 1}, {"__planet__": 1}]
)
def test_malformed_plain_data_is_refused(form: Any) -> None:
    with pytest.raises(ConfigurationError, match="malformed"):
        PPOConfig.from_state({"env_config": form})


def test_serialize_is_json_to_look_at() -> None:
    config = cartpole().multi_agent(policies={"b", "a"}, policy_mapping_fn=lambda agent_id, episode: "a")
    config.environment(env_config={"array": np.arange(2), "box": gym.spaces.Discrete(2), "in": {1: FREE}})
    config.env_runners(env_to_module_connector=gym.make)
    config.evaluation(evaluation_config=PPOConfig().training(lr=0.5))
    plain = config.serialize()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["policies"] == ["a", "b"]
    assert 'policy_mapping_fn=lambda agent_id, episode: "a"' in plain["policy_mapping_fn"]
    assert plain["env_to_module_connector"] == "gymnasium.envs.registration.make"
    assert plain["env_config"]["array"] == [0, 1]
    assert plain["env_config"]["box"] == "Discrete(2)"
    assert plain["evaluation_config"]["lr"] == 0.5


def test_functions_travel_by_name_and_lambdas_are_refused_by_setting() -> None:
    named = cartpole().callbacks(on_train_result=dict)
    assert PPOConfig.from_state(named.get_state(), trust=["builtins"]).callbacks_hooks == {
        "on_train_result": [dict]
    }
    with pytest.raises(ConfigurationError, match=r"config\.policy_mapping_fn="):
        cartpole().multi_agent(policy_mapping_fn=lambda a, e: "p").get_state()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (lambda: PPOConfig(), "env is None"),
        (lambda: cartpole().learners(num_learners=3), "Nearest valid: 3999 or 4002"),
        (lambda: cartpole().training(train_batch_size_per_learner=100), "Largest valid: 100"),
        (lambda: cartpole().env_runners(rollout_fragment_length=5000), "Largest that fits: 2000, or 'auto'"),
        (lambda: cartpole().networking(listen="tcp://*:5555"), "name the address of the interface"),
        (lambda: cartpole().training(lr=[(5, 0.1), (9, 0.0)]), "first point at 5 env steps instead of 0"),
        (lambda: cartpole().multi_agent(policies={"a", "b"}), "policy_mapping_fn is None"),
        (lambda: cartpole().evaluation(evaluation_config={"explor": False}), "Did you mean 'explore'"),
        (lambda: cartpole().evaluation(evaluation_config="greedy"), "expected a dict of settings by name"),
        (lambda: cartpole().rl_module(algorithm_config_overrides_per_module={"px": {"lr": 0.3}}), "'px'"),
        (
            lambda: cartpole().rl_module(
                algorithm_config_overrides_per_module={"default_policy": {"gamma": 2.0}}
            ),
            r"overrides_per_module\['default_policy'\]: config\.gamma: expected",
        ),
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


def test_overrides_check_names() -> None:
    assert PPOConfig.overrides(lr=1.0) == {"lr": 1.0}
    with pytest.raises(KeyError, match="Did you mean 'lr'"):
        PPOConfig.overrides(lrr=1.0)
    with pytest.raises(ConfigurationError, match="Did you mean 'lr'"):
        PPOConfig().update_from_dict({"lrr": 1.0})


def test_per_module_overrides() -> None:
    config = cartpole().multi_agent(
        policies=["a", "b"],
        policy_mapping_fn=lambda a, e: "a",
        algorithm_config_overrides_per_module={"b": PPOConfig.overrides(lr=0.5)},
    )
    assert config.get_config_for_module("a").lr == 5e-5
    assert config.get_config_for_module("b").lr == 0.5


def evaluating(evaluation_config: Any, num_env_runners: int = 1) -> PPOConfig:
    return cartpole().evaluation(
        evaluation_config=evaluation_config, evaluation_num_env_runners=num_env_runners
    )


@pytest.mark.parametrize(
    "settings",
    [PPOConfig().training(lr=0.5).env_runners(num_env_runners=5), {"num_env_runners": 5, "lr": 0.5}],
)
def test_evaluation_has_its_own_number_of_runners_whatever_its_config(settings: Any) -> None:
    for num_env_runners in (0, 1):
        config = evaluating(settings, num_env_runners).get_evaluation_config_object()
        assert (config.num_env_runners, config.lr) == (num_env_runners, 0.5)
        assert config.in_evaluation
        assert config.evaluation_config is None


def test_an_evaluation_config_of_its_own_has_the_runs_modules_and_seed() -> None:
    run = evaluating(PPOConfig().environment("Pendulum-v1")).debugging(seed=3)
    run.multi_agent(policies=["a", "b"], policy_mapping_fn=lambda agent_id, episode: "a")
    config = run.get_evaluation_config_object()
    assert (config.env, config.seed, config.module_ids) == ("Pendulum-v1", 3, ["a", "b"])
    assert config.policy_mapping_fn is run.policy_mapping_fn
    assert with_module(run, "c").get_evaluation_config_object().module_ids == ["a", "b", "c"]


def test_an_evaluation_config_is_copied_frozen_and_written_with_its_run() -> None:
    given = PPOConfig().training(lr=0.5)
    config = evaluating(given)
    frozen = config.copy()
    frozen.freeze()
    assert frozen.evaluation_config.is_frozen
    assert not given.is_frozen
    assert not frozen.copy(copy_frozen=False).evaluation_config.is_frozen
    back = PPOConfig.from_state(config.get_state()).evaluation_config
    assert type(back) is PPOConfig
    assert back.diff() == given.diff()


def test_validation_can_be_switched_off() -> None:
    config = PPOConfig().training(use_critic=False, train_batch_size_per_learner=1)
    config.experimental(_validate_config=False).validate()
    with pytest.raises(ConfigurationError):
        config.experimental(_validate_config=True).validate()


def test_the_multi_agent_setup_is_specs_and_who_is_trained() -> None:
    config = PPOConfig().environment(MultiAgentCartPole, env_config={"num_agents": 2})
    config.multi_agent(
        policies={"p0"}, policy_mapping_fn=lambda agent_id, episode: "p0", policies_to_train=["p0"]
    )
    specs, is_trained = config.get_multi_agent_setup(policies=["p0", "p1"])
    assert list(specs) == ["p0", "p1"]
    assert specs["p1"].action_space == gym.spaces.Discrete(2)
    assert [is_trained(module_id, None) for module_id in specs] == [True, False]
    assert config.module_ids == ["p0"]
    config.multi_agent(policies_to_train=lambda module_id, batch: batch == 1)
    assert config.get_multi_agent_setup()[1]("p0", 1)
