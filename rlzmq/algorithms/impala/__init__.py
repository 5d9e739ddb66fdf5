"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018, arXiv:1802.01561)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.impala.impala_config import IMPALAConfig as IMPALAConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import IMPALA as IMPALA

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
