"""Learners compile their modules, or the whole step, and learn the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from rlzmq import ConfigurationError, PPOConfig


def trained(**framework: Any) -> dict[str, Any]:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .training(train_batch_size_per_learner=60, minibatch_size=20, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .debugging(seed=3)
        .framework(**framework)
    )
    with config.build() as algo:
        algo.train()
        return dict(algo.get_module().get_state())


@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("forward_train", "aot_eager"),
        ("forward_train", "eager"),
        pytest.param("complete_update", "eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_learner_learns_the_same(what: str, backend: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = trained(
        torch_compile_learner=True,
        torch_compile_learner_what_to_compile=what,
        torch_compile_learner_dynamo_backend=backend,
    )
    assert counters["frames"]["ok"] >= 2  # x + 1, and what was to be compiled
    for name, value in trained().items():
        assert torch.allclose(torch.as_tensor(compiled[name]), torch.as_tensor(value), atol=1e-5), name


def test_a_backend_that_cannot_be_used_is_refused_when_the_run_is_built(monkeypatch: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has no such backend.*Did you mean 'inductor'"):
        trained(torch_compile_learner=True, torch_compile_learner_dynamo_backend="inducto")
    mode = {"torch_compile_learner_dynamo_mode": "nonsense"}
    with pytest.raises(ConfigurationError, match="'eager' has no modes"):
        trained(torch_compile_learner=True, torch_compile_learner_dynamo_backend="eager", **mode)
    with pytest.raises(ConfigurationError, match=r"'inductor' \(mode 'nonsense'\) cannot be used here"):
        trained(torch_compile_learner=True, **mode)
