"""Search objects: their values, where they may be, and their plain form."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from rlzmq import DefaultModelConfig, PPOConfig, RLModuleSpec, tune
from rlzmq.config.search_space import (
    SEARCH_FUNCTIONS,
    find_search_objects,
    replace_values,
    search_objects_in_tables,
)
from rlzmq.core.errors import ConfigurationError
from rlzmq.tune.search import random_trial, resolve, suggest, value_of


def drawn(search_object: Any, number: int = 300) -> list[Any]:
    return [
        value_of(search_object, suggest(random_trial(seed), "x", search_object)) for seed in range(number)
    ]


@pytest.mark.parametrize(
    ("search_object", "low", "high", "step"),
    [
        (tune.uniform(-1, 2), -1, 2, 0),
        (tune.uniform(False, True), 0, 1, 0),
        (tune.quniform(0.5, 2, 0.25), 0.5, 2, 0.25),
        (tune.loguniform(1e-5, 1e-1), 1e-5, 1e-1, 0),
        (tune.qloguniform(0.5, 8, 0.5), 0.5, 8, 0.5),
        (tune.randint(2, 5), 2, 4, 1),
        (tune.qrandint(2, 8, 2), 2, 8, 2),
        (tune.lograndint(1, 9), 1, 8, 1),
        (tune.qlograndint(2, 16, 2), 2, 16, 2),
        (tune.qrandn(0, 1, 0.5), -6, 6, 0.5),
    ],
)
def test_values_are_within_the_bounds_and_on_the_grid(
    search_object: Any, low: float, high: float, step: float
) -> None:
    values = drawn(search_object)
    assert min(values) >= low
    assert max(values) <= high
    name = search_object.call[0]
    assert {type(value) for value in values} == {int if "int" in name else float}
    if step:
        assert all(abs(value / step - round(value / step)) < 1e-9 for value in values)
    if "int" in name:
        assert {min(values), max(values)} == {low, high}  # both ends are drawn


def test_logarithms_and_normal_values_are_distributed_as_named() -> None:
    values = np.log10(drawn(tune.loguniform(1e-4, 1.0), 2000))
    assert np.mean(values) == pytest.approx(-2, abs=0.1)
    normal = drawn(tune.randn(3, 2), 2000)
    assert (np.mean(normal), np.std(normal)) == (pytest.approx(3, abs=0.2), pytest.approx(2, abs=0.2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tune.uniform(2, 1), r"uniform\(2, 1\): expected lower < upper"),
        (lambda: tune.loguniform(0, 1), "a logarithm needs lower > 0"),
        (lambda: tune.quniform(0, 1, 0.3), "must be multiples of q"),
        (lambda: tune.choice([]), "a list of at least one value"),
        (lambda: PPOConfig().training(lr=tune.choice([0.1, "a"])), "config.lr: expected .*, got 'a'"),
        (
            lambda: PPOConfig().training(num_epochs=tune.uniform(1, 3)),
            "expected int > 0, got .* uniform.1, 3. draws",
        ),
        (lambda: PPOConfig().training(use_kl_loss=tune.uniform(False, True)), "use_kl_loss: expected bool"),
        (lambda: search_objects_in_tables({"lr": {"loguniform": [1]}}), r"loguniform = \[1\]: .*missing"),
    ],
)
def test_bad_arguments_are_named(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def connector(env: Any, spaces: Any, device: Any, *, number: int) -> int:
    return number


def test_search_objects_may_be_anywhere_in_a_config() -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1", env_config={"sizes": [1, {"b": tune.choice([2])}]})
        .training(lr=tune.choice([0.5]), entropy_coeff=[[0, tune.choice([0.1])], [100, 0.0]])
        .env_runners(env_to_module_connector=functools.partial(connector, number=tune.choice([7])))
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=tune.choice([[5]]), use_lstm=tune.choice([True]))
        )
        .evaluation(evaluation_config=PPOConfig().training(gamma=tune.choice([0.25])))
    )
    space = find_search_objects(config)
    assert set(space) == {
        "env_config/sizes/1/b",
        "lr",
        "entropy_coeff/0/1",
        "env_to_module_connector/number",
        "model_config/fcnet_hiddens",
        "model_config/use_lstm",
        "evaluation_config/gamma",
    }
    trial = replace_values(config, {path: item.values[0] for path, item in space.items()})  # type: ignore[attr-defined]
    assert find_search_objects(trial) == {}
    assert trial.env_config == {"sizes": [1, {"b": 2}]}
    assert trial.lr == 0.5
    assert trial.entropy_coeff == [(0.0, 0.1), (100.0, 0.0)]
    assert trial.env_to_module_connector(None, None, None) == 7
    assert trial.model_config["fcnet_hiddens"] == [5]
    assert trial.model_config["use_lstm"] is True
    assert trial.evaluation_config.gamma == 0.25
    assert set(find_search_objects(config)) == set(space)  # the config itself is unchanged
    spec = RLModuleSpec(model_config={"fcnet_hiddens": tune.choice([[3]])})
    spec_config = PPOConfig().rl_module(rl_module_spec=spec)
    (path,) = find_search_objects(spec_config)
    replaced = replace_values(spec_config, {path: [3]})
    assert replaced.rl_module_spec.model_config == {"fcnet_hiddens": [3]}


def test_a_bad_value_of_a_nested_search_object_is_an_error_of_its_trial() -> None:
    config = PPOConfig().rl_module(model_config=DefaultModelConfig(fcnet_hiddens=tune.choice([[5], "wide"])))
    with pytest.raises(ConfigurationError, match="expected a list of widths"):
        replace_values(config, {"model_config/fcnet_hiddens": "wide"})


def test_configs_with_search_objects_are_stored_and_read() -> None:
    config = PPOConfig().training(lr=tune.loguniform(1e-5, 1e-2), gamma=tune.choice([0.9, 0.99]))
    config.environment("CartPole-v1", env_config={"size": tune.qrandint(2, 8, 2)})
    again = PPOConfig.from_state(config.get_state())
    assert repr(again) == repr(config)
    assert repr(PPOConfig.from_toml(config.to_toml())) == repr(config)


def test_toml_tables_name_the_functions() -> None:
    read = search_objects_in_tables(
        {
            "lr": {"loguniform": [1e-5, 1e-2]},
            "a": [{"choice": [[1], [2]]}],
            "b": {"grid_search": [1, 2], "c": 3},
        }
    )
    assert repr(read["lr"]) == "loguniform(1e-05, 0.01)"
    assert repr(read["a"]) == "[choice([[1], [2]])]"
    assert read["b"] == {"grid_search": [1, 2], "c": 3}  # an ordinary table
    assert set(SEARCH_FUNCTIONS) <= set(tune.__all__)


def test_functions_see_the_other_values_and_are_seeded() -> None:
    space = {
        "x": tune.choice([3]),
        "inner": {"y": tune.sample_from(lambda spec: spec.config.x + np.random.randint(1000))},
    }
    found = find_search_objects(space)
    first, again, other = (resolve(space, found, {"x": 3}, seed) for seed in (1, 1, 2))
    assert first == again != other


class _Plain:
    size = 3


@pytest.mark.parametrize("path", ["env_config/own/size", "env_config/size", "no_setting"])
def test_a_value_that_cannot_be_set_is_an_error(path: str) -> None:
    config = PPOConfig().environment("CartPole-v1", env_config={"own": _Plain(), "sizes": [1, 2]})
    assert replace_values(config, {"env_config/sizes/1": 5})["env_config"]["sizes"] == [1, 5]
    with pytest.raises(ConfigurationError, match=path):
        replace_values(config, {"env_config/sizes/1": 5, path: 4})
