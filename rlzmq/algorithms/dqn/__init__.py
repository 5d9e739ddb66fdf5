"""DQN: deep Q-network (Mnih et al. 2013, arXiv:1312.5602) with the parts of Rainbow (arXiv:1710.02298)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.dqn.dqn_config import DQNConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.dqn.dqn import DQN

__all__ = ["DQN", "DQNConfig"]


def __getattr__(name: str) -> Any:
    """Import DQN on first use: it imports torch, which configs do not need."""
    if name != "DQN":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.dqn.dqn import DQN

    return DQN
