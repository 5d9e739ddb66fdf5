"""Settings: none is accepted and ignored, a wrong value is named with what is expected; those of RLlib alone."""

from __future__ import annotations

import logging
import re
import shutil
import tracemalloc
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box

import rlzmq
from rlzmq import (
    PPO,
    AlgorithmConfig,
    ConfigurationError,
    DQNConfig,
    IMPALAConfig,
    MultiAgentEnvRunner,
    PPOConfig,
    SACConfig,
    SingleAgentEnvRunner,
    tune,
)
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.config import rllib_only
from rlzmq.config.rllib_only import RLLIB_ONLY, RLlibOnly, find_rllib_only
from rlzmq.envs.examples import MultiAgentCartPole
from tests.support.runs import small


@pytest.fixture(scope="module")
def read() -> set[str]:
    """All attributes and texts in the sources, but for the file that declares the settings."""
    package = Path(rlzmq.__file__).parent
    sources = (path for path in package.rglob("*.py") if path != package / "config" / "groups.py")
    return {name for path in sources for name in re.findall(r"(?:\.|[\"'])(\w+)\b", path.read_text())}


@pytest.mark.parametrize("config_class", [get_config_class(name) for name in ALGORITHMS])
def test_each_setting_is_read(config_class: type[AlgorithmConfig], read: set[str]) -> None:
    assert config_class._fields.keys() - read == {"learner_config_dict"}, "users read it"


@pytest.mark.parametrize("config_class", [get_config_class(name) for name in ALGORITHMS])
def test_each_setting_is_declared_once_and_explained(config_class: type[AlgorithmConfig]) -> None:
    config = config_class()
    assert config.keys() == list(config_class._fields)
    assert config_class._defaults.keys() <= config_class._fields.keys()
    for name, field in config_class._fields.items():
        assert field.name == name
        assert field.doc, f"{name} has no entry under Args: in its group's docstring"
        field.check(vars(config)[name])  # its default is a valid value


def test_a_value_without_effect_is_refused_where_it_is_given() -> None:
    with pytest.raises(ConfigurationError, match="render_mode"):
        PPOConfig().from_dict({"render_env": True})
    with pytest.raises(ConfigurationError, match="'complete_update' with num_learners=2"):
        PPOConfig().environment("CartPole-v1").learners(num_learners=2).framework(
            torch_compile_learner_what_to_compile="complete_update"
        ).validate()


@pytest.fixture
def library_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("rlzmq")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers = handlers


def test_small_settings_have_their_effect(library_logger: logging.Logger, caplog: Any) -> None:
    evaluation = {"evaluation_interval": 1, "evaluation_duration": 1, "evaluation_sample_timeout_s": 0.0}
    config = small(**evaluation, log_gradients=False, log_level="INFO")
    with config.build() as algo:
        result = algo.train()
    assert library_logger.level == logging.INFO
    assert "gradients_default_optimizer_global_norm" not in result["learners"]["default_policy"]
    assert "more than evaluation_sample_timeout_s=0.0" in caplog.text


VALUES: list[Any] = [
    "a", -1, 1.5, object(), [1, "a"], {"x": 1}, {1: 2}, None, float("nan"), True, (), b"x", "", [[0, "a"]], PPOConfig,
]  # fmt: skip
TAILS = re.compile(r"pydantic|type=\w+|input_value|validation error|Annotated|typing\.|\b_[A-Z]")


def mistakes(algorithm: str, *, is_whole: bool) -> list[tuple[str, str]]:
    """(setting, text) of each value that the setter refuses; if it is whole, of settings that all have too, and by
    validate()."""
    kind = get_config_class(algorithm)
    found = []
    for name, field in kind._fields.items():
        is_common = AlgorithmConfig._fields.get(name) == field
        if not field.group or name.startswith("_") or (is_common and not is_whole):
            continue
        for value in VALUES:
            config = kind().environment("CartPole-v1")
            try:
                getattr(config, field.group)(**{name: value})
                if is_whole:
                    config.validate()
            except ConfigurationError as error:
                found.append((name, str(error)))
    return found


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"bc"}))
def test_a_wrong_value_is_a_configuration_error_that_names_the_setting(algorithm: str) -> None:
    is_whole = algorithm in ("ppo", "dqn")
    found = mistakes(algorithm, is_whole=is_whole)
    assert len(found) > (500 if is_whole else 15)
    for name, text in found:
        assert not TAILS.search(text), text
        assert "\n" not in text, text
        assert name in text or "address" in text, text


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("[training]\nlr = 'a'\n", "lr: expected float"),
        ("[trainnig]\nlr = 1\n", "Did you mean 'training'"),
        ("learning_rate = 1\n", "Instead: 'lr'"),
        ("env = 'CartPole-v1\n", "not valid TOML"),
    ],
)
def test_a_mistake_in_a_toml_file_names_the_file(toml: str, text: str, tmp_path: Any) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(toml)
    with pytest.raises(ConfigurationError, match=r"mine\.toml") as caught:
        PPOConfig.from_toml(file)
    assert text in str(caught.value)


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
    with pytest.raises(TypeError, match="has no setting 'broadcast_interval'"):
        DQNConfig().training(broadcast_interval=1)
    with pytest.raises(TypeError, match="has no setting 'hiddens'"):
        DQNConfig().env_runners(hiddens=[256])
    with pytest.raises(ConfigurationError, match=r"except for 0\.0"):
        IMPALAConfig().training(replay_proportion=0.5)


def test_a_setting_of_another_setter_is_named_instead_of_a_similar_one() -> None:
    with pytest.raises(ConfigurationError, match=r"set environment\(clip_actions=…\)"):
        SACConfig().training(clip_actions=True)
    with pytest.raises(TypeError, match=r"checkpointing\(checkpoint_replay=…\)"):
        SACConfig().training(checkpoint_replay=True)


def test_a_search_of_an_ignored_value_is_ignored() -> None:
    config = IMPALAConfig().environment("CartPole-v1")
    config.training(broadcast_interval=tune.randint(1, 4))
    config.env_runners(num_cpus_per_env_runner=tune.choice([1, 2])).validate()


def test_a_space_in_the_settings_takes_no_memory_but_its_own() -> None:
    space = Box(0, 255, (2048, 2048), np.uint8)
    tracemalloc.start()
    try:
        text = PPOConfig().environment("CartPole-v1", observation_space=space).to_toml()
        again = PPOConfig.from_toml(text).observation_space
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    own_bytes = sum(getattr(space, name).nbytes for name in ("low", "high", "bounded_below", "bounded_above"))
    assert peak_bytes < 1.5 * own_bytes
    assert (len(text) < 1000, again) == (True, space)


def test_rewards_are_clipped_in_the_env() -> None:
    config = PPOConfig().environment("Pendulum-v1", clip_rewards=0.5).env_runners(num_env_runners=0)
    (episode,) = SingleAgentEnvRunner(config=config).sample(num_episodes=1)
    assert min(episode.get_rewards()) == -0.5
    several = PPOConfig().environment(MultiAgentCartPole, env_config={"num_agents": 2}, clip_rewards=0.5)
    several.multi_agent(policies={"both"}, policy_mapping_fn=lambda agent_id, episode: "both")
    (episode,) = MultiAgentEnvRunner(config=several).sample(num_episodes=1)
    assert {*chain(*(agent.get_rewards() for agent in episode.agent_episodes.values()))} == {0.5}
    with pytest.raises(ConfigurationError, match="clip_rewards: expected bool or float ≥ 0"):
        config.environment(clip_rewards=-1.0).validate()


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
