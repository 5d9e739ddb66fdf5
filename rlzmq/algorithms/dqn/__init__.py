"""DQN: deep Q-network (Mnih et al. 2013, arXiv:1312.5602) with the parts of Rainbow (arXiv:1710.02298)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.dqn.dqn_config import DQNConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import DQN

__all__ = ["DQN", "DQNConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, DQN="rlzmq.algorithms.classes")
