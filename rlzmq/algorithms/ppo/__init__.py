"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.ppo.ppo_config import PPOConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import PPO

__all__ = ["PPO", "PPOConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, PPO="rlzmq.algorithms.classes")
