"""DQN: Q-learning from a replay buffer."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.dqn.dqn_config import DQNConfig

__all__ = ["DQN"]


class DQN(Algorithm):
    """DQN (arXiv:1312.5602). A training step is one update according to `update_plan()`."""

    config_class = DQNConfig
