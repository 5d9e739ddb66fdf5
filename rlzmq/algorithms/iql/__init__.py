"""IQL: implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.iql.iql_config import IQLConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import IQL

__all__ = ["IQL", "IQLConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, IQL="rlzmq.algorithms.classes")
