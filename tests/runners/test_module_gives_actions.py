"""A module that chooses its actions itself: they are used as they are, and get their log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlzmq import Columns, PPOConfig, SingleAgentEnvRunner, TorchCategorical, TorchRLModule
from rlzmq.modules.spec import RLModuleSpec


class Chooses(TorchRLModule):
    """Always takes the second action, and says how it would have drawn."""

    def setup(self) -> None:
        self.net = torch.nn.Linear(self.observation_space.shape[0], self.action_space.n)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits = self.net(batch[Columns.OBS])
        return {
            Columns.ACTIONS: torch.ones(len(logits), dtype=torch.int64),
            Columns.ACTION_DIST_INPUTS: logits,
        }


@pytest.mark.parametrize("use_rows", [True, False])
def test_given_actions_get_their_logp_while_exploring(use_rows: bool) -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Chooses))
    )
    runner = SingleAgentEnvRunner(config=config)
    runner.use_rows = use_rows
    for episode in runner.sample(num_timesteps=20):
        np.testing.assert_array_equal(episode.get_actions(), np.ones(len(episode)))
        logits = torch.as_tensor(episode.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS))
        expected = TorchCategorical.from_logits(logits).logp(torch.ones(len(episode), dtype=torch.int64))
        logp = episode.get_extra_model_outputs(Columns.ACTION_LOGP)
        np.testing.assert_allclose(logp, expected.numpy(), rtol=1e-6)
    runner.stop()
