"""No setting is accepted and then ignored: each is read somewhere."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlzmq
from rlzmq import (
    AlgorithmConfig,
    ConfigurationError,
    PPOConfig,
)
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from tests.support.runs import small

# What the library does not read itself.
_OF_USERS = {"learner_config_dict"}


@pytest.fixture(scope="module")
def read() -> set[str]:
    """All attributes and texts in the sources, but for the file that declares the settings."""
    package = Path(rlzmq.__file__).parent
    sources = (path for path in package.rglob("*.py") if path != package / "config" / "groups.py")
    return {name for path in sources for name in re.findall(r"(?:\.|[\"'])(\w+)\b", path.read_text())}


@pytest.mark.parametrize("config_class", [get_config_class(name) for name in ALGORITHMS])
def test_each_setting_is_read(config_class: type[AlgorithmConfig], read: set[str]) -> None:
    assert config_class._fields.keys() - read == _OF_USERS


@pytest.mark.parametrize("config_class", [get_config_class(name) for name in ALGORITHMS])
def test_each_setting_is_declared_once_and_explained(config_class: type[AlgorithmConfig]) -> None:
    config = config_class()
    assert config.keys() == list(config_class._fields)
    assert config_class._defaults.keys() <= config_class._fields.keys()
    for name, field in config_class._fields.items():
        assert field.name == name
        assert field.doc, f"{name} has no entry under Args: in its group's docstring"
        field.check(vars(config)[name])  # its default is a valid value


def test_setters_show_their_settings() -> None:
    signature = inspect.signature(PPOConfig.training)
    assert {"self", "lr", "clip_param", "learner_class"} <= signature.parameters.keys()
    assert "clip_param: The surrogate's clip range" in (PPOConfig.training.__doc__ or "")
    assert (
        inspect.signature(AlgorithmConfig.environment).parameters["env"].kind.name == "POSITIONAL_OR_KEYWORD"
    )


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
