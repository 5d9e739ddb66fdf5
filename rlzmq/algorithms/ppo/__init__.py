"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.ppo.ppo_config import PPOConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.ppo.ppo import PPO

__all__ = ["PPO", "PPOConfig"]


def __getattr__(name: str) -> Any:
    """Import PPO on first use: it imports torch, which configs do not need."""
    if name != "PPO":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.ppo.ppo import PPO

    return PPO
