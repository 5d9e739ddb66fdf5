"""Optimizers, clipping, mixed precision and torch.compile with the learners of DQN, SAC, BC and IQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlzmq import (
    BCConfig,
    ConfigurationError,
    DQNConfig,
    IQLConfig,
    PPOConfig,
    SACConfig,
    SingleAgentEnvRunner,
)
from rlzmq.replay import write_shard

ALGORITHMS = ("dqn", "sac", "bc", "iql")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    runner: Any = SingleAgentEnvRunner(config=PPOConfig().environment("Pendulum-v1").debugging(seed=1))
    write_shard(path, runner.sample(num_timesteps=400), normalize_actions=True)
    runner.stop()
    return path


def config_of(algorithm: str, data: Path, learner: type | None = None, **training: Any) -> Any:
    """Three batches in the second update, or in each one from recorded data."""
    config: Any = {"dqn": DQNConfig, "sac": SACConfig, "bc": BCConfig, "iql": IQLConfig}[algorithm]()
    config.environment("CartPole-v1" if algorithm == "dqn" else "Pendulum-v1")
    config.rl_module(model_config={"fcnet_hiddens": [8]}).debugging(seed=3)
    if algorithm in ("dqn", "sac"):
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=8)
        config.reporting(min_sample_timesteps_per_iteration=1, min_time_s_per_iteration=0)
        config.training(
            train_batch_size=16,
            training_intensity=1.5,
            num_steps_sampled_before_learning_starts=32,
            target_network_update_freq=8,
        )
    else:
        config.offline_data(input_=str(data), dataset_num_iters_per_learner=3)
        config.training(train_batch_size_per_learner=16)
    if learner is not None:
        name = config.learner_class.__name__
        config.training(learner_class=type(f"{learner.__name__}{name}", (learner, config.learner_class), {}))
    return config.training(**training)


def trained(config: Any) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """The learner after two updates, the weights it began with, and its results."""
    with config.build() as algo:
        before = {name: torch.as_tensor(value) for name, value in algo.get_module().get_state().items()}
        algo.train()
        result = algo.train()["learners"]
        learner = algo.learner_group.foreach_learner(lambda learner: learner)[0]
    assert result["__all_modules__"]["num_gradient_updates_lifetime"] >= 3
    return learner, before, result["default_policy"]


def weights_of(learner: Any) -> dict[str, Tensor]:
    return {
        name: torch.as_tensor(value) for name, value in learner.module["default_policy"].get_state().items()
    }


class TwoOptimizers:
    """Mix-in: every other parameter has an optimizer that takes no steps."""

    def configure_optimizers_for_module(self: Any, module_id: str, config: Any) -> None:
        parameters = [p for p in self.get_parameters(self.module[module_id]) if p.requires_grad]
        for name, lr, mine in (("moving", 0.1, parameters[::2]), ("still", 0.0, parameters[1::2])):
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=torch.optim.SGD(mine, lr=lr),
                params=mine,
                lr_or_lr_schedule=lr,
            )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_optimizer_steps_its_parameters_at_its_rate(algorithm: str, data: Path) -> None:
    learner, before, result = trained(config_of(algorithm, data, TwoOptimizers))
    after = weights_of(learner)
    names = [name for name, p in learner.module["default_policy"].named_parameters() if p.requires_grad]
    assert all(torch.equal(after[name], before[name]) for name in names[1::2])
    assert not all(torch.equal(after[name], before[name]) for name in names[::2])
    assert (result["moving_learning_rate"], result["still_learning_rate"]) == (0.1, 0.0)
    assert result["gradients_moving_global_norm"] > 0.0


class NotesGradients:
    """Mix-in: keeps what the optimizers get, by optimizer."""

    def apply_gradients(self: Any, gradients_dict: dict[Tensor, Tensor]) -> None:
        self.noted = [
            [g.clone() for g in self.filter_param_dict_for_optimizer(gradients_dict, optimizer).values()]
            for _, optimizer in self.get_optimizers_for_module("default_policy")
        ]
        super().apply_gradients(gradients_dict)  # type: ignore[misc]


@pytest.mark.parametrize("grad_clip_by", ["value", "norm", "global_norm"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradients_of_each_optimizer_are_clipped(algorithm: str, grad_clip_by: str, data: Path) -> None:
    most = 1e-4
    config = config_of(algorithm, data, NotesGradients, grad_clip=most, grad_clip_by=grad_clip_by)
    learner, _, result = trained(config)
    assert len(learner.noted) == {"dqn": 1, "bc": 1, "sac": 3, "iql": 3}[algorithm]
    for (name, _), gradients in zip(
        learner.get_optimizers_for_module("default_policy"), learner.noted, strict=True
    ):
        if result[f"gradients_{name}_global_norm"] <= 100 * most:
            continue  # it may have been small enough
        if grad_clip_by == "value":
            norms = [max(float(g.abs().max()) for g in gradients)]
        elif grad_clip_by == "norm":
            norms = [max(float(g.norm()) for g in gradients)]
        else:
            norms = [float(torch.cat([g.flatten() for g in gradients]).norm())]
        assert norms == pytest.approx([most], rel=1e-3), name


class Autocast:
    """Mix-in: forward passes and losses in mixed precision."""

    def forward_train(self: Any, batch: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16):
            self.outputs = super().forward_train(batch)  # type: ignore[misc]
        return self.outputs

    def compute_losses(self: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16):
            return super().compute_losses(**kwargs)  # type: ignore[misc]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_mixed_precision_learns_about_the_same(algorithm: str, data: Path) -> None:
    learner, before, result = trained(config_of(algorithm, data, Autocast))
    dtypes = {leaf.dtype for leaf in learner.outputs["default_policy"].values() if isinstance(leaf, Tensor)}
    assert torch.bfloat16 in dtypes
    assert result["num_nonfinite_gradients_skipped"] == 0
    exact, _, _ = trained(config_of(algorithm, data))
    for name, value in weights_of(exact).items():
        mine = weights_of(learner)[name]
        assert mine.dtype == value.dtype == torch.float32, name
        moved = float((value - before[name]).norm())
        assert float((mine - value).norm()) <= 0.25 * moved + 1e-6, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_compiled_forward_pass_trains_the_same(algorithm: str, data: Path) -> None:
    config = config_of(algorithm, data).framework(
        torch_compile_learner=True,
        torch_compile_learner_what_to_compile="forward_train",
        torch_compile_learner_dynamo_backend="aot_eager" if algorithm == "dqn" else "eager",
    )
    compiled, _, _ = trained(config)
    plain, _, _ = trained(config_of(algorithm, data))
    for name, value in weights_of(plain).items():
        assert np.allclose(weights_of(compiled)[name], value, atol=1e-5), name


@pytest.mark.parametrize("algorithm", ["dqn", "sac", "iql"])
def test_a_complete_update_with_target_networks_is_not_compiled(algorithm: str, data: Path) -> None:
    config = config_of(algorithm, data).framework(
        torch_compile_learner=True, torch_compile_learner_what_to_compile="complete_update"
    )
    with pytest.raises(ConfigurationError, match="Use 'forward_train'"):
        config.validate()
