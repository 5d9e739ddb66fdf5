"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.ppo.ppo_config import PPOConfig as PPOConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import PPO as PPO

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
