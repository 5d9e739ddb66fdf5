"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.impala.impala_config import IMPALAConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import IMPALA

__all__ = ["IMPALA", "IMPALAConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, IMPALA="rlzmq.algorithms.classes")
