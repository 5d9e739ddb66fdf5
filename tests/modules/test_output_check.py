"""A module whose outputs do not fit its spaces is refused when it is built: the whole text."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import Columns, RLModuleSpec, TorchRLModule, ValueFunctionAPI
from rlzmq.core.errors import ConfigurationError
from rlzmq.modules.distributions import TorchCategorical
from rlzmq.modules.output_check import check_acting_outputs
from tests.support.runs import small

BOX = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
DISCRETE = gym.spaces.Discrete(2)
DIST = Columns.ACTION_DIST_INPUTS


class Odd(TorchRLModule, ValueFunctionAPI):
    """Outputs and values as its subclasses say."""

    num_forwards = 0

    def setup(self) -> None:
        self.pi = torch.nn.Linear(4, 5)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        self.num_forwards += 1
        return self.outputs(batch[Columns.OBS], batch)

    def outputs(self, obs: torch.Tensor, batch: dict[str, Any]) -> Any:
        return {DIST: self.pi(obs)[..., :2]}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        return batch[Columns.OBS].sum(-1)


class TooWide(Odd):
    def outputs(self, obs: Any, batch: Any) -> Any:
        return {DIST: self.pi(obs)}


class Memory(Odd):
    def get_initial_state(self) -> Any:
        return {"h": torch.zeros(6)}

    def outputs(self, obs: Any, batch: Any) -> Any:
        return {**super().outputs(obs, batch), "state_out": {"h": torch.zeros(obs.shape[0], 7)}}


class TrailingOne(Odd):
    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        return batch[Columns.OBS].sum(-1, keepdim=True)


class WideInTraining(Odd):
    def _forward_train(self, batch: Any, **kwargs: Any) -> Any:
        return {DIST: self.pi(batch[Columns.OBS])}


def config_with(module_class: type, action_space: gym.Space[Any] = DISCRETE) -> Any:
    env_config = {"observation_space": BOX, "action_space": action_space}
    spec = RLModuleSpec(module_class=module_class)
    return small(env="rlzmq.envs.examples:RandomEnv", env_config=env_config, rl_module_spec=spec)


SAMPLES = "'action_dist_inputs' out of _forward_exploration"
NEEDS = "as TorchCategorical of action_space Discrete(2) has 2 inputs per row."


@pytest.mark.parametrize(
    ("module_class", "text"),
    [
        (TooWide, f"{SAMPLES} has the shape (3, 5) for 3 observations; expected (3, 2), {NEEDS}"),
        (Memory, "expected those of get_initial_state() with 3 rows, {'h': (3, 6)}."),
        (
            TrailingOne,
            "compute_values() returned the shape (3, 1) for 3 observations; expected (3,): one value each.",
        ),
        (WideInTraining, "out of _forward_train has the shape (3, 5) for 3 observations; expected (3, 2)"),
    ],
)
def test_an_output_that_does_not_fit_is_named_with_both_shapes_at_build(
    module_class: type, text: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_with(module_class).build()
    assert text in str(caught.value)
    assert f"module 'default_policy' ({module_class.__name__}): " in str(caught.value)


class OwnCategorical(TorchCategorical):
    """Two logits out of five inputs."""

    @classmethod
    def from_logits(cls, logits: Any) -> Any:
        return super().from_logits(logits[..., :2])

    @staticmethod
    def required_input_dim(space: Any, model_config: Any = None) -> int:
        raise NotImplementedError


class OwnDistribution(TooWide):
    action_dist_cls = OwnCategorical


class Reads(Odd):
    """Reads a column that is not there yet."""

    def outputs(self, obs: Any, batch: Any) -> Any:
        return {DIST: self.pi(obs)[..., :2] + batch["made_by_a_connector"]}


@pytest.mark.parametrize("module_class", [Odd, OwnDistribution, Reads])
def test_a_module_that_fits_or_cannot_be_tried_is_built_and_left_alone(module_class: type) -> None:
    before = torch.random.get_rng_state()
    with config_with(module_class).build() as algo:
        assert algo.get_module().num_forwards == 0
    assert torch.equal(torch.random.get_rng_state(), before)


def test_of_several_modules_the_one_is_named() -> None:
    spec = RLModuleSpec(module_class=TooWide, observation_space=BOX, action_space=DISCRETE)
    module = spec.build(module_id="striker")
    with pytest.raises(ConfigurationError, match=r"^module 'striker' \(TooWide\): "):
        check_acting_outputs(module)
