"""Learners compile their modules, or the whole step, and learn the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlzmq import APPOConfig, ConfigurationError, IMPALAConfig, PPOConfig
from tests.support.runs import small


def trained(**framework: Any) -> dict[str, Any]:
    config = small(train_batch_size_per_learner=60, minibatch_size=20, seed=3, **framework)
    with config.build() as algo:
        algo.train()
        return dict(algo.get_module().get_state())


@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("forward_train", "aot_eager"),
        ("forward_train", "eager"),
        ("complete_update", "eager"),
    ],
)
def test_a_compiled_learner_learns_the_same(what: str, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = trained(
        torch_compile_learner=True,
        torch_compile_learner_what_to_compile=what,
        torch_compile_learner_dynamo_backend=backend,
    )
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 2  # x + 1, and what was to be compiled
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


@pytest.mark.slow
@pytest.mark.parametrize("config_cls", [PPOConfig, IMPALAConfig, APPOConfig])
def test_a_compiled_update_is_compiled_again_only_a_few_times(config_cls: Any) -> None:
    torch._dynamo.reset()
    config = (
        config_cls()
        .environment("CartPole-v1")
        .training(train_batch_size_per_learner=60, minibatch_size=20, num_epochs=2)
        .training(entropy_coeff=[[0, 0.1], [10_000, 0.0]])
        .reporting(min_time_s_per_iteration=0)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .framework(
            torch_compile_learner=True,
            torch_compile_learner_what_to_compile="complete_update",
            torch_compile_learner_dynamo_backend="aot_eager",
        )
    )
    if config_cls is PPOConfig:
        config.training(kl_target=1e-6)  # so that the coefficient changes after each update
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), config.build() as algo:
        for _ in range(12):
            results = algo.train()
    assert results["learners"]["default_policy"]["total_loss"]
