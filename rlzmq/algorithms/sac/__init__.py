"""SAC: soft actor-critic (Haarnoja et al. 2018, arXiv:1801.01290, arXiv:1812.05905)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.sac.sac_config import SACConfig as SACConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import SAC as SAC

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
