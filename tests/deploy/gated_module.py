"""A module whose forward pass ends when a file appears: what happens in between is the test's choice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from rlzmq import TorchRLModule, ValueFunctionAPI


class GatedModule(TorchRLModule, ValueFunctionAPI):
    """Computes zeros; an observation that begins with 1.0 waits for ``model_config["directory"]/go``."""

    def setup(self) -> None:
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        if bool((obs[:, 0] == 2.0).any()):
            raise RuntimeError("this observation makes the module fail")
        if bool((obs[:, 0] == 1.0).any()):
            directory = Path(self.model_config["directory"])
            (directory / "begun").touch()
            while not (directory / "go").exists():
                time.sleep(0.01)
        return {"action_dist_inputs": torch.zeros(len(obs), 2) + self.bias}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        return torch.zeros(len(batch["obs"]))
