"""APPO: PPO's clipped objective on IMPALA's architecture (IMPACT: Luo et al. 2019, arXiv:1912.00167)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.appo.appo_config import APPOConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import APPO

__all__ = ["APPO", "APPOConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, APPO="rlzmq.algorithms.classes")
