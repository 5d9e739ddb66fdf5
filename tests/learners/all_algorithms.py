"""A small configuration of every algorithm, for tests of what all learners have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlzmq
from rlzmq import OffPolicyConfig, PPOConfig, SingleAgentEnvRunner
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.replay import write_shard

REPLAYING = tuple(name for name in ALGORITHMS if issubclass(get_config_class(name), OffPolicyConfig))
ON_POLICY = tuple(name for name in ALGORITHMS if get_config_class(name)().is_online and name not in REPLAYING)
NUM_OPTIMIZERS = {"sac": 3, "tqc": 3, "cql": 3, "iql": 3, "td3": 2}


def record_pendulum(folder: Path) -> Path:
    """Record two episodes of Pendulum for the offline algorithms."""
    runner: Any = SingleAgentEnvRunner(config=PPOConfig().environment("Pendulum-v1").debugging(seed=1))
    write_shard(folder, runner.sample(num_timesteps=400), normalize_actions=True)
    runner.stop()
    return folder


def config_of(algorithm: str, data: Path, learner: type | None = None, **training: Any) -> Any:
    """Three minibatches or more in two updates.

    Args:
        algorithm: One of `ALGORITHMS`.
        data: Recorded episodes for the offline ones.
        learner: A mix-in of the algorithm's learner.
        training: Settings.
    """
    config: Any = getattr(rlzmq, f"{algorithm.upper()}Config")()
    config.environment("CartPole-v1" if algorithm in (*ON_POLICY, "dqn") else "Pendulum-v1")
    config.rl_module(model_config={"fcnet_hiddens": [8]}).debugging(seed=3)
    config.learners(num_learners=0).reporting(min_time_s_per_iteration=0)
    if algorithm in ON_POLICY:
        config.env_runners(num_env_runners=0)
        config.training(train_batch_size_per_learner=32, minibatch_size=16)
    elif algorithm in REPLAYING:
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=8)
        config.reporting(min_sample_timesteps_per_iteration=1)
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
