"""SAC: soft actor-critic (Haarnoja et al. 2018, arXiv:1801.01290, arXiv:1812.05905)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.sac.sac_config import SACConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import SAC

__all__ = ["SAC", "SACConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, SAC="rlzmq.algorithms.classes")
