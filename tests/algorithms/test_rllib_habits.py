"""What code written for RLlib expects of configs, classes and names."""

from __future__ import annotations

from typing import Any, Self

import pytest

import rlzmq
from rlzmq import (
    AlgorithmConfig,
    Learner,
    NotProvided,
    PPOConfig,
    PPOTorchLearner,
    RLModuleSpec,
    TorchLearner,
    TorchRLModule,
    override,
)
from rlzmq.core import names
from rlzmq.core.errors import ConfigurationError


class VPGConfig(AlgorithmConfig):
    """A config class in RLlib's form: settings and defaults are assigned in the constructor."""

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class)
        self.num_episodes_per_train_batch = 10
        self.num_env_runners = 1

    @override(AlgorithmConfig)
    def training(self, *, num_episodes_per_train_batch: Any = NotProvided, **kwargs: Any) -> Self:
        super().training(**kwargs)
        if num_episodes_per_train_batch is not NotProvided:
            self.num_episodes_per_train_batch = num_episodes_per_train_batch
        return self


def test_a_config_class_declares_its_settings_in_its_constructor() -> None:
    config = VPGConfig().training(num_episodes_per_train_batch=3, lr=0.01)
    assert (config.num_episodes_per_train_batch, config.lr, config.num_env_runners) == (3, 0.01, 1)
    assert config.given() == {"num_episodes_per_train_batch": 3, "lr": 0.01}
    assert config.diff() == config.given()
    assert VPGConfig.from_dict(config.to_dict()).num_episodes_per_train_batch == 3
    assert config.copy().num_episodes_per_train_batch == 3


def test_after_the_constructor_a_misspelt_setting_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'num_episodes_per_train_batch'"):
        VPGConfig().num_episode_per_train_batch = 3


def test_what_a_constructor_assigns_is_checked() -> None:
    class Wrong(AlgorithmConfig):
        def __init__(self) -> None:
            super().__init__()
            self.num_env_runners = "two"

    with pytest.raises(ConfigurationError, match="expected int ≥ 0"):
        Wrong()


def test_a_learner_class_may_have_mix_ins_of_the_base() -> None:
    class LogsMore(Learner):
        pass

    class Mixed(TorchLearner, LogsMore):
        pass

    class MixedPPO(PPOTorchLearner, LogsMore):
        pass

    assert issubclass(Mixed, TorchLearner)
    assert issubclass(PPOConfig().get_default_learner_class(), TorchLearner)
    assert PPOConfig().learners(learner_class=MixedPPO).learner_class is MixedPPO
    assert AlgorithmConfig().learner_class is TorchLearner


def test_the_module_spec_is_the_default_one_until_it_is_set() -> None:
    assert PPOConfig().rl_module_spec.module_class is rlzmq.DefaultPPOTorchRLModule
    spec = RLModuleSpec(model_config={"fcnet_hiddens": [3]})
    assert PPOConfig().rl_module(rl_module_spec=spec).rl_module_spec is spec


def test_override_finds_a_misspelt_method() -> None:
    with pytest.raises(NameError, match="Did you mean 'compute_losses'"):

        class Misspelt(Learner):
            @override(Learner)
            def compute_los(self) -> None: ...


def test_catalogs_are_refused_and_none_is_fine() -> None:
    assert TorchRLModule(catalog_class=None) is not None
    with pytest.raises(ConfigurationError, match="no catalogs here"):
        TorchRLModule(catalog_class=dict)


def test_every_name_of_results_is_importable() -> None:
    constants = {name: value for name, value in vars(names).items() if name.isupper()}
    assert len(constants) > 40
    assert all(getattr(rlzmq, name) == value for name, value in constants.items())
    assert rlzmq.COMPONENT_RL_MODULE == "rl_module"
    assert rlzmq.NUM_ENV_STEPS_SAMPLED_LIFETIME == "num_env_steps_sampled_lifetime"
