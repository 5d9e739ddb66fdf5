"""RunnerLink: weights that were published before a runner's modules changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq import PPOConfig
from rlzmq.protocol.events import ApplyWeights
from rlzmq.protocol.weights import Publication
from rlzmq.roles.runner_role import EnvRunnerRole, RunnerLink


@pytest.fixture
def role() -> Any:
    config = PPOConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [4]})
    role = EnvRunnerRole(config, 1)
    yield role
    role.close()


def publication(role: EnvRunnerRole, layout_digest: str, num_bytes: int) -> ApplyWeights:
    header = Publication("run", 1, 1, "digest", layout_digest, num_bytes)
    return ApplyWeights(header, bytes(num_bytes))


def test_weights_of_the_former_modules_are_not_loaded_after_a_change(role: EnvRunnerRole) -> None:
    link = SimpleNamespace(_role=role, _submit=lambda job: job())
    layout = role.env_runner.get_weights_layout()
    role.change_modules(role.env_runner.config, None)
    RunnerLink.act(link, publication(role, "other", layout.num_bytes + 8))
    assert role.env_runner.weights_seq_no == 0
    RunnerLink.act(link, publication(role, layout.digest, layout.num_bytes))
    assert role.env_runner.weights_seq_no == 1
