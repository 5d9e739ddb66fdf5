"""APPO: PPO's clipped objective on IMPALA's architecture (IMPACT: Luo et al. 2019, arXiv:1912.00167)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.appo.appo_config import APPOConfig as APPOConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import APPO as APPO

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
