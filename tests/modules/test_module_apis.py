"""Mix-ins: what a module promises must be there; target networks, action values and losses of its own."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn

from rlzmq.modules.rl_module import (
    InferenceOnlyAPI,
    QNetAPI,
    SelfSupervisedLossAPI,
    TargetNetworkAPI,
    TorchRLModule,
    ValueFunctionAPI,
)
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.modules.weights import WeightsLayout

OBS, ACT = gym.spaces.Box(-1.0, 1.0, (3,)), gym.spaces.Discrete(2)


class QModule(TorchRLModule, QNetAPI, TargetNetworkAPI, InferenceOnlyAPI):
    def setup(self) -> None:
        self.q = nn.Linear(3, 2)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": self.q(batch["obs"]).argmax(-1)}

    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"qf_preds": self.q(batch["obs"])}

    def make_target_networks(self) -> None:
        self.target_q = copy.deepcopy(self.q)

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.q, self.target_q)]

    def forward_target(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        return self.target_q(batch["obs"])

    def get_non_inference_attributes(self) -> list[str]:
        return ["target_q"]


def test_target_networks_are_made_later_and_never_sent_to_runners() -> None:
    learner, runner = (RLModuleSpec(QModule, OBS, ACT, inference_only=only).build() for only in (False, True))
    before = WeightsLayout.of(learner).digest
    learner.make_target_networks()
    assert WeightsLayout.of(learner).digest == before == WeightsLayout.of(runner).digest
    assert "target_q.weight" in learner.get_state()
    assert list(learner.get_state(inference_only=True)) == list(runner.get_state())
    runner.set_state(learner.get_state())
    batch = {"obs": torch.randn(4, 3)}
    assert torch.equal(learner.forward_target(batch), learner.compute_q_values(batch)["qf_preds"])
    assert runner.forward_inference(batch)["actions"].shape == (4,)
    with pytest.raises(NotImplementedError, match="QModule has no advantage stream"):
        learner.compute_advantage_distribution(batch)


@pytest.mark.parametrize(
    "api", [InferenceOnlyAPI, QNetAPI, SelfSupervisedLossAPI, TargetNetworkAPI, ValueFunctionAPI]
)
def test_a_promise_that_is_not_kept_is_an_error_when_building(api: type[Any]) -> None:
    broken = type("Broken", (TorchRLModule, api), {})
    with pytest.raises(TypeError, match="abstract"):
        RLModuleSpec(broken, OBS, ACT).build(module_id="p0")


def test_model_configs_do_not_import_torch() -> None:
    code = "import sys, rlzmq; rlzmq.DefaultModelConfig(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
