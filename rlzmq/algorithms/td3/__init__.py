"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.td3.td3_config import TD3Config as TD3Config
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import TD3 as TD3

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
