"""PPO: sample a batch under the newest weights, train on it for some epochs, repeat."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.ppo.ppo_config import PPOConfig

__all__ = ["PPO"]


class PPO(Algorithm):
    """Proximal Policy Optimization (arXiv:1707.06347), on-policy: staleness 0.

    The training step is that of the base class: one update of exactly `total_train_batch_size` env steps, sampled
    with the weights of the previous update.
    """

    config_class = PPOConfig
