"""RLlib's settings that are not here: ignored with one warning, or an error that says what to do instead."""

from __future__ import annotations

import logging
import re
import shutil

import pytest

from rlzmq import (
    PPO,
    AlgorithmConfig,
    ConfigurationError,
    DQNConfig,
    IMPALAConfig,
    PPOConfig,
    SACConfig,
    SingleAgentEnvRunner,
    tune,
)
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.config import rllib_only
from rlzmq.config.rllib_only import RLLIB_ONLY, RLlibOnly, find_rllib_only

CONFIGS = [get_config_class(name) for name in sorted(ALGORITHMS)]


def config_with(row: RLlibOnly) -> AlgorithmConfig:
    """Return a config to which the row applies."""
    fitting = [
        kind
        for kind in CONFIGS
        if find_rllib_only(kind, row.name, row.setter) is row
        and (row.name not in kind._fields or kind._fields[row.name].group != row.setter)
    ]
    assert fitting, f"no config has RLlib's {row.setter}({row.name}=…)"
    config = fitting[0]()
    assert isinstance(config, AlgorithmConfig)
    return config


@pytest.fixture(autouse=True)
def _nothing_was_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rllib_only, "_warned", set())


@pytest.mark.parametrize("row", RLLIB_ONLY, ids=lambda row: f"{row.config}-{row.setter}-{row.name}")
def test_each_is_ignored_with_one_warning_or_refused_with_advice(
    row: RLlibOnly, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_with(row)
    before = config.to_dict()
    take = getattr(config, row.setter)
    example = {"use_lstm": True} if row.to == "model_config" else 3 if row.to else object()
    if row.to:
        before[row.to] = example
    with caplog.at_level(logging.WARNING, "rlzmq"):
        for value in (example,) if row.accepted is None else row.accepted:
            assert take(**{row.name: value}) is config
            take(**{row.name: value})
    assert config.to_dict() == before
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (row.accepted is None)
    assert all(row.name in text and row.instead in text for text in messages)
    assert row.instead.endswith(".")
    if row.accepted is not None:
        with pytest.raises(ConfigurationError, match=re.escape(row.instead)) as raised:
            take(**{row.name: "another value"})
        assert f"{row.setter}({row.name}='another value')" in str(raised.value)


def test_a_setting_is_taken_by_the_configs_that_have_it_in_rllib_only() -> None:
    with pytest.raises(TypeError, match=r"DQNConfig\.training\(\) has no setting 'broadcast_interval'"):
        DQNConfig().training(broadcast_interval=1)
    with pytest.raises(TypeError, match="has no setting 'hiddens'"):
        DQNConfig().env_runners(hiddens=[256])
    with pytest.raises(ConfigurationError, match=r"except for 0\.0"):
        IMPALAConfig().training(replay_proportion=0.5)


def test_a_setting_of_another_setter_is_named_instead_of_a_similar_one() -> None:
    with pytest.raises(ConfigurationError, match=r"set environment\(clip_actions=…\)"):
        SACConfig().training(clip_actions=True)
    with pytest.raises(TypeError, match=r"Instead: \.checkpointing\(checkpoint_replay=…\)"):
        SACConfig().training(checkpoint_replay=True)


def test_a_search_of_an_ignored_value_is_ignored() -> None:
    config = IMPALAConfig().environment("CartPole-v1")
    config.training(broadcast_interval=tune.randint(1, 4))
    config.env_runners(num_cpus_per_env_runner=tune.choice([1, 2])).validate()


def test_rewards_are_clipped_in_the_env() -> None:
    config = PPOConfig().environment("Pendulum-v1", clip_rewards=0.5).env_runners(num_env_runners=0)
    (episode,) = SingleAgentEnvRunner(config=config).sample(num_episodes=1)
    assert min(episode.get_rewards()) == -0.5


def test_an_algorithm_takes_a_dict_and_its_class_is_set_as_an_attribute() -> None:
    config = AlgorithmConfig()
    config.algo_class = PPO
    assert config.algo_class is PPO
    settings = {
        "env": "CartPole-v1",
        "num_env_runners": 0,
        "train_batch_size_per_learner": 32,
        "minibatch_size": 32,
    }
    with PPO(config=settings) as algo:
        weights = algo.get_weights(["default_policy"])
        tree = {"default_policy": {name: value * 0 for name, value in weights["default_policy"].items()}}
        algo.set_weights(tree)
        assert all((value == 0).all() for value in algo.get_weights()["default_policy"].values())
        saved = algo.save()
        assert saved.checkpoint.path == saved
    shutil.rmtree(saved)
