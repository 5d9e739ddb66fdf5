"""A small algorithm that learns from recorded episodes only: behavior cloning, for tests of the machinery."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlzmq import PPOConfig
from rlzmq.core.update_plan import UpdatePlan
from rlzmq.episodes.columns import Columns
from rlzmq.learners.learner import TorchLearner
from rlzmq.learners.offline_learner import OfflineShards
from rlzmq.replay import open_shards, write_shard
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner

BATCH, PER_UPDATE = 20, 3


class CloningLearner(TorchLearner):
    """Maximizes the likelihood of the recorded actions."""

    def make_source(self) -> OfflineShards:
        return OfflineShards(
            open_shards(self.config.learner_config_dict["shards"]).shards,
            batch_size=BATCH,
            batches_per_update=PER_UPDATE,
        )

    def compute_loss_for_module(self, *, module_id: str, batch: Any, fwd_out: Any, **kwargs: Any) -> Tensor:
        logits = fwd_out[Columns.ACTION_DIST_INPUTS]
        return torch.nn.functional.cross_entropy(logits, batch[Columns.ACTIONS].long())


class CloningConfig(PPOConfig):
    """Settings of it."""

    def update_plan(self) -> UpdatePlan:
        return dataclasses.replace(super().update_plan(), env_steps_per_rank=0)


def record(directory: Path) -> None:
    """Write two shards of CartPole episodes."""
    config = PPOConfig().environment("CartPole-v1").debugging(seed=1)
    runner: Any = SingleAgentEnvRunner(config=config)
    for _ in range(2):
        write_shard(directory, runner.sample(num_episodes=8, random_actions=True))
    runner.stop()


def cloning_config(directory: Path, num_env_runners: int, num_learners: int) -> Any:
    record(directory)
    return (
        CloningConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=num_env_runners)
        .learners(
            num_learners=num_learners,
            learner_class=CloningLearner,
            learner_config_dict={"shards": str(directory)},
        )
        .training(num_epochs=1, minibatch_size=None, lr=1e-3)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .reporting(min_time_s_per_iteration=0)
        .debugging(seed=3)
    )
