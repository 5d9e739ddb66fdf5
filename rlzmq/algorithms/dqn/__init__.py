"""DQN: deep Q-network (Mnih et al. 2013, arXiv:1312.5602) with the parts of Rainbow (arXiv:1710.02298)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.dqn.dqn_config import DQNConfig as DQNConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import DQN as DQN

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
