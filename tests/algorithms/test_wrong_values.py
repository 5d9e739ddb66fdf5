"""A wrong value of any setting: one line names the setting, what is expected and what came."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlzmq import AlgorithmConfig, ConfigurationError, PPOConfig
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class

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
