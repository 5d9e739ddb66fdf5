"""What a learner's copy of a module puts out in a trial step is what runners' fragments hold."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import ConnectorV2, PPOConfig, RLModuleSpec
from rlzmq.core.names import WEIGHTS_SEQ_NO
from rlzmq.driver.async_env_runner_group import MergedConnectors
from rlzmq.modules.rl_module import TorchRLModule
from rlzmq.roles.learner_link import BatchCheck, module_outputs
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner


class Random(TorchRLModule):
    """Puts out more where it is a learner's, and draws numbers."""

    def setup(self) -> None:
        self.layer = torch.nn.Linear(4, 2)

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        logits = self.layer(batch["obs"]) + 0 * torch.rand(2)
        outputs = {"action_dist_inputs": logits, "latent": {"a": logits[:, :1], "b": logits.argmax(-1)}}
        return outputs if self.inference_only else {**outputs, "vf_preds": logits[:, 0]}


class Demanding(Random):
    """Reads what only a custom connector piece adds."""

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.layer(batch["my_column"])}


def _config(**model: Any) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2)
    return config.debugging(seed=1).rl_module(**model)


def _learners_module(config: PPOConfig, runner: SingleAgentEnvRunner) -> Any:
    return config.get_multi_rl_module_spec(spaces=runner.get_spaces()).build()["default_policy"]


MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "lstm": {"model_config": {"use_lstm": True, "lstm_cell_size": 8}},
    "lstm with the last action": {"model_config": {"use_lstm": True, "lstm_use_prev_action": True}},
    "custom": {"rl_module_spec": RLModuleSpec(module_class=Random)},
}


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_trial_step_knows_exactly_the_columns_of_a_fragment(model: str, explore: bool) -> None:
    config = _config(**MODELS[model]).env_runners(explore=explore)
    runner = SingleAgentEnvRunner(config=config)
    try:
        module = _learners_module(config, runner)
        batch = runner.sample(num_timesteps=8)
    finally:
        runner.stop()
    before = torch.random.get_rng_state()
    outputs = module_outputs(module, explore=explore)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not module.inference_only
    assert outputs.keys() == batch.columns.keys() - {"obs", "actions", "rewards", WEIGHTS_SEQ_NO}
    check = BatchCheck()
    check.expect({}, None, {"default_policy": outputs})
    check.check(batch)
    name = "action_dist_inputs"
    batch.columns[name] = np.zeros((*batch.columns[name].shape, 2), np.float32)
    with pytest.raises(ValueError, match="the module's own outputs define it"):
        check.check(batch)


def test_a_module_that_cannot_be_tried_tells_nothing() -> None:
    box = gym.spaces.Box(-1, 1, (4,), np.float32)
    module = RLModuleSpec(module_class=Demanding, observation_space=box, action_space=gym.spaces.Discrete(2))
    assert module_outputs(module.build(), explore=True) == {}


@pytest.mark.parametrize("is_custom", [False, True])
def test_custom_pieces_behind_the_module_may_change_what_it_puts_out(is_custom: bool) -> None:
    class Piece(ConnectorV2):
        def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
            return batch

    config = _config()
    if is_custom:
        config.env_runners(module_to_env_connector=lambda *args, **kwargs: Piece())
    box, actions = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)
    sync = MergedConnectors(config, {"__env_single__": (box, actions), "__env__": (box, actions)})
    assert sync.stores_module_outputs is not is_custom
