"""config.env: ids, names, classes, callables, module paths; and what a wrong one is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.examples import RandomEnv, StatelessCartPole
from rlzmq.envs.registry import EnvContext, make_env, register_env, resolve_env


class TakesContext(gym.Env[Any, Any]):
    def __init__(self, config: EnvContext) -> None:
        self.config = config


class TakesKeywords(gym.Env[Any, Any]):
    def __init__(self, size: int = 3, render_mode: str | None = None) -> None:
        self.size = size


class TakesNothing(gym.Env[Any, Any]):
    pass


def test_a_gymnasium_id_takes_the_settings_as_keywords() -> None:
    env = make_env("CartPole-v1", {"sutton_barto_reward": True})
    assert env.unwrapped._sutton_barto_reward is True


def test_an_id_without_version_means_the_newest() -> None:
    assert resolve_env("CartPole").gym_id == "CartPole-v1"
    assert resolve_env("Taxi").gym_id == max(key for key in gym.registry if key.startswith("Taxi-v"))


def test_a_class_gets_the_context() -> None:
    env = make_env(TakesContext, EnvContext({"a": 1}, worker_index=2, vector_index=3))
    assert env.config == {"a": 1}
    assert (env.config.worker_index, env.config.vector_index) == (2, 3)


class TakesOut(gym.Env[Any, Any]):
    def __init__(self, config: EnvContext) -> None:
        self.size = config.pop("size")


def test_an_env_that_takes_settings_out_of_its_config_can_be_made_again() -> None:
    context = EnvContext({"size": 3})
    assert [make_env(TakesOut, context).size for _ in range(2)] == [3, 3]


class TakesTwo(gym.Env[Any, Any]):
    def __init__(self, size: int, speed: float) -> None:
        self.size, self.speed = size, speed


class TakesContextAndMore(gym.Env[Any, Any]):
    def __init__(self, config: EnvContext, speed: float) -> None:
        self.config = config


def test_parameters_without_defaults_get_the_items_of_their_names() -> None:
    made = make_env(TakesTwo, {"size": 7, "speed": 2.5})
    assert (made.size, made.speed) == (7, 2.5)
    assert make_env(lambda size: TakesKeywords(size), {"size": 4}).size == 4
    with pytest.raises(ConfigurationError, match=r"env_config=\{'speed': …\}"):
        make_env(TakesTwo, {"size": 7})
    with pytest.raises(ConfigurationError, match="give 'speed' a default"):
        make_env(TakesContextAndMore, {"speed": 1.0})


def test_classes_with_defaults_callables_with_and_without_a_parameter_and_partials_work() -> None:
    assert make_env(TakesKeywords, {"size": 7}).size == 7
    assert make_env(TakesKeywords).size == 3
    assert make_env(lambda: TakesKeywords(5)).size == 5
    assert make_env(lambda _: TakesKeywords(6)).size == 6
    assert make_env(lambda config=None: TakesKeywords(config["n"]), {"n": 8}).size == 8
    assert make_env(partial(TakesKeywords, 9)).size == 9


def test_a_registered_name_goes_before_an_id() -> None:
    register_env("registry-test-env", lambda context: TakesContext(context))
    assert make_env("registry-test-env", {"b": 2}).config == {"b": 2}


def test_a_module_path_names_a_class_or_an_id_that_the_module_registers() -> None:
    assert resolve_env("rlzmq.envs.examples:RandomEnv").creator is RandomEnv
    assert resolve_env("gymnasium:CartPole-v1").gym_id == "CartPole-v1"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("CartPol-v1", "Did you mean 'CartPole-v1'"),
        ("no such thing at all", "pass the env"),
        ("rlzmq.envs.examples:RandomEn", "Did you mean 'RandomEnv'"),
        ("not.a.module:Thing", "'not.a.module:Thing' cannot be found"),
        ("ALE/NoSuchGame-v5", "ale_py|pass the env|NameThisGame"),
        (None, r"config\.environment\(env="),
        (42, "got 42"),
        (TakesNothing(), "pass the class"),
    ],
)
def test_a_wrong_env_is_refused_with_the_way_out(env: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        resolve_env(env)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"config\.env_config has 'a'"):
        make_env(TakesNothing, {"a": 1})
    with pytest.raises(ConfigurationError, match=r"no parameter 'siz'.*Did you mean 'size'"):
        make_env(TakesKeywords, {"siz": 1})
    with pytest.raises(ConfigurationError, match="does not take the settings"):
        make_env("CartPole-v1", {"no_such_setting": 1})


def test_a_context_is_copied_with_overrides_and_takes_defaults() -> None:
    context = EnvContext({"a": 1}, worker_index=1, num_workers=4)
    other = context.copy_with_overrides(vector_index=2)
    assert (other, other.worker_index, other.vector_index, other.num_workers) == ({"a": 1}, 1, 2, 4)
    other.set_defaults({"a": 5, "b": 6})
    assert other == {"a": 1, "b": 6}
    assert context == {"a": 1}


def test_stateless_cartpole_hides_the_velocities_and_ends_after_its_limit() -> None:
    env, full = StatelessCartPole({"max_episode_steps": 5}), gym.make("CartPole-v1")
    observation, _ = env.reset(seed=3)
    expected, _ = full.reset(seed=3)
    assert observation.tolist() == expected[[0, 2]].tolist()
    flags = [env.step(step % 2)[2:4] for step in range(5)]
    assert flags == [(False, False)] * 4 + [(False, True)]
