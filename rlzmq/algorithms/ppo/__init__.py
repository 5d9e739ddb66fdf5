"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from rlzmq.algorithms.ppo.ppo import PPO
from rlzmq.algorithms.ppo.ppo_config import PPOConfig

__all__ = ["PPO", "PPOConfig"]
