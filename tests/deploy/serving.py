"""What the tests of servers share: checkpoints without training, requests over HTTP, a module that waits."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rlzmq import AlgorithmConfig, PPOConfig, TorchRLModule, ValueFunctionAPI

JsonAnswer = tuple[int, dict[str, Any]]


def cartpole(**model: Any) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=3)
    return config.rl_module(model_config={"fcnet_hiddens": [16], **model})


def write_checkpoint(config: AlgorithmConfig, path: Path, seed: int = 0) -> Path:
    """A checkpoint of random weights."""
    algorithm = config.copy(copy_frozen=False).build()
    try:
        torch.manual_seed(seed)
        state = algorithm.learner_group.get_state()
        for module in state["rl_module"].values():
            for name, value in module.items():
                module[name] = value + 0.5 * torch.randn(value.shape).numpy().astype(value.dtype)
        algorithm.learner_group.set_state(state)
        return Path(algorithm.save_to_path(path))
    finally:
        algorithm.stop()


class Http:
    """One connection to a server, kept open between requests."""

    def __init__(self, url: str, token: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> JsonAnswer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, {**self._headers, **named})
        response = self._connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text[:1] == b"{" else {"text": text.decode()}

    def act(self, **call: Any) -> JsonAnswer:
        return self.ask("POST", "/v1/act", json.dumps(call).encode())

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()


# -- a module that waits -------------------------------------------------------------------------------


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
