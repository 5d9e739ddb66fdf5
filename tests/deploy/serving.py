"""What the tests of servers share: checkpoints without training, requests over HTTP."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rlzmq import AlgorithmConfig, PPOConfig

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
