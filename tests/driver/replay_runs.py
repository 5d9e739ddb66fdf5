"""A small algorithm that learns from a replay buffer: Q-learning without frills, for tests of the machinery."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlzmq import PPOConfig
from rlzmq.connectors.learner import AddNextObservationsFromEpisodesToTrainBatch
from rlzmq.core.update_plan import UpdatePlan
from rlzmq.episodes.columns import Columns
from rlzmq.learners.learner import TorchLearner
from rlzmq.learners.replay_source import EpisodeReplay
from rlzmq.replay import EpisodeReplayBuffer

FRESH, BATCH, RATIO, WARM_UP = 40, 32, 2.5, 100


class ReplayLearner(TorchLearner):
    """Q-learning on the logits of PPO's module."""

    def make_source(self) -> EpisodeReplay:
        buffer = EpisodeReplayBuffer(5000, seed=0)
        return EpisodeReplay.of_plan(
            self.config.update_plan(), buffer, batch_size=BATCH // self.config.num_ranks, n_step=2, gamma=0.9
        )

    def make_learner_connector(self, observation_space: Any, action_space: Any) -> Any:
        pipeline = super().make_learner_connector(observation_space, action_space)
        pipeline.append(AddNextObservationsFromEpisodesToTrainBatch())
        return pipeline

    def compute_loss_for_module(self, *, module_id: str, batch: Any, fwd_out: Any, **kwargs: Any) -> Tensor:
        module = self.module[module_id].unwrapped()
        values = fwd_out[Columns.ACTION_DIST_INPUTS]
        with torch.no_grad():
            following = module.forward_train({Columns.OBS: batch[Columns.NEXT_OBS]})
            bootstrap = following[Columns.ACTION_DIST_INPUTS].max(-1).values * 0.9 ** batch["n_step"]
            targets = batch[Columns.REWARDS] + torch.where(batch[Columns.TERMINATEDS], 0.0, bootstrap)
        chosen = values.gather(-1, batch[Columns.ACTIONS].long()[:, None])[:, 0]
        return (chosen - targets).square().mean()


class ReplayConfig(PPOConfig):
    """Settings of it."""

    @property
    def num_ranks(self) -> int:
        return max(self.num_learners, 1)

    def update_plan(self) -> UpdatePlan:
        staleness = self.staleness
        return UpdatePlan(
            env_steps_per_rank=FRESH // self.num_ranks,
            num_ranks=self.num_ranks,
            fragment_length=5,
            staleness=staleness,
            max_policy_lag=-1,
            train_ratio=RATIO,
            warm_up=WARM_UP,
            open_updates=staleness + 1,
            keeps_episodes=True,
        )


def replay_config(num_env_runners: int, num_learners: int, staleness: int = 0) -> ReplayConfig:
    config: Any = (
        ReplayConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4)
        .learners(num_learners=num_learners, learner_class=ReplayLearner)
        .training(
            train_batch_size_per_learner=FRESH // max(num_learners, 1), minibatch_size=None, num_epochs=1
        )
        .training(staleness=staleness, lr=1e-3)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=3)
    )
    return config  # type: ignore[no-any-return]
