"""Presets: known settings for known environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlzmq import PPO, ConfigurationError, PPOConfig
from rlzmq.algorithms.registry import apply_preset, presets_of
from rlzmq.cli.train import _parse


def test_every_preset_is_valid() -> None:
    presets = presets_of("ppo")
    assert "CartPole-v1" in presets
    for env in presets:
        config = PPOConfig().environment(env)
        assert apply_preset(config, "ppo", env)
        for num_learners in (0, 1, 2, 4):
            config.learners(num_learners=num_learners).validate()


def test_an_unknown_env_or_algorithm_has_none() -> None:
    config = PPOConfig()
    assert not apply_preset(config, "ppo", "Nowhere-v0")
    assert not apply_preset(config, "ppo", dict)
    assert presets_of("nothing") == {}
    assert config.diff() == {}


def test_config_files_and_flags_win_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[training]\nlr = 5e-05\n")  # the algorithm's own default, given on purpose
    arguments = ["--env", "CartPole-v1", "--config", str(file), "--num-epochs", "3", "--quiet"]
    _, config = _parse("ppo", arguments)
    assert (config.lr, config.num_epochs, config.clip_param, config.vf_clip_param) == (5e-5, 3, 0.2, None)
    _, plain = _parse("ppo", [*arguments, "--preset", "none"])
    assert (plain.lr, plain.num_epochs, plain.clip_param) == (5e-5, 3, 0.3)


@pytest.mark.parametrize("name", ["CartPole-v1", "cartpole-v1", "cartpole"])
def test_presets_are_for_python_too(name: str) -> None:
    config = PPOConfig.preset(name).training(lr=3e-4)
    assert (config.env, config.lr, config.clip_param) == ("CartPole-v1", 3e-4, 0.2)
    _, flags = _parse("ppo", ["--env", "CartPole-v1", "--lr", "3e-4", "--quiet"])
    assert config.to_dict() == flags.to_dict()


def test_an_unknown_preset_names_the_closest() -> None:
    with pytest.raises(
        ConfigurationError, match="ppo has no preset 'CartPol-v1'\\. Did you mean 'CartPole-v1'"
    ):
        PPOConfig.preset("CartPol-v1")

    class MyConfig(PPOConfig):
        pass

    assert isinstance(MyConfig.preset("pendulum"), MyConfig)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("CartPole-v1", "PPOConfig().environment('CartPole-v1').build()"),
        ({"env": "CartPole-v1"}, "PPOConfig.from_dict({…}).build()"),
        (PPOConfig, "PPOConfig().environment(…).build()"),
    ],
)
def test_an_algorithm_made_of_something_else_says_what_to_write(given: object, advice: str) -> None:
    with pytest.raises(TypeError) as caught:
        PPO(given)
    assert advice in str(caught.value)
