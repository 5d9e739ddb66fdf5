"""RLlib's settings that are not here: ignored with one warning, or an error that says what to do instead."""

from __future__ import annotations

import logging
import re

import pytest

from rlzmq import (
    AlgorithmConfig,
    APPOConfig,
    BCConfig,
    ConfigurationError,
    DQNConfig,
    IMPALAConfig,
    SACConfig,
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
    with caplog.at_level(logging.WARNING, "rlzmq"):
        for value in (object(),) if row.accepted is None else row.accepted:
            assert take(**{row.name: value}) is config
            take(**{row.name: value})
    assert config.to_dict() == before
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (row.accepted != ())
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
    IMPALAConfig().training(learner_queue_size=3)
    with pytest.raises(ConfigurationError, match="except for 16"):
        APPOConfig().training(learner_queue_size=3)


def test_the_same_holds_for_dicts_and_attributes() -> None:
    IMPALAConfig().update_from_dict({"broadcast_interval": 1, "opt_type": "rmsprop"})
    with pytest.raises(ConfigurationError, match="staleness"):
        IMPALAConfig.from_dict({"broadcast_interval": 5})
    config = DQNConfig()
    config.adam_epsilon = 1e-4  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"checkpoint_replay=True"):
        config.store_buffer_in_checkpoints = True  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"It is RLlib's; instead: override configure_optimizers"):
        _ = config.adam_epsilon  # type: ignore[attr-defined]


def test_a_setting_of_another_setter_is_named_instead_of_a_similar_one() -> None:
    with pytest.raises(ConfigurationError, match=r"set environment\(clip_actions=…\)"):
        SACConfig().training(clip_actions=True)
    with pytest.raises(TypeError, match=r"Instead: \.checkpointing\(checkpoint_replay=…\)"):
        SACConfig().training(checkpoint_replay=True)


def test_ray_data_is_not_asked_to_keep_batches_in_memory() -> None:
    config = BCConfig().offline_data(materialize_data=True, materialize_mapped_data=False)
    assert config.materialize_data
