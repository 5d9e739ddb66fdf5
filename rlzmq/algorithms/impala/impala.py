"""IMPALA: runners sample ahead of the learner; V-trace corrects for it."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.impala.impala_config import IMPALAConfig

__all__ = ["IMPALA"]


class IMPALA(Algorithm):
    """IMPALA (arXiv:1802.01561). The training step is the base class's: one update as `update_plan()` says."""

    config_class = IMPALAConfig
