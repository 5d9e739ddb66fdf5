"""IMPALA: runners sample ahead of the learner; V-trace corrects for it."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.impala.impala_config import IMPALAConfig

__all__ = ["IMPALA"]


class IMPALA(Algorithm):
    """IMPALA (arXiv:1802.01561). A training step is one update according to `update_plan()`."""

    config_class = IMPALAConfig
