"""CQL: conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.cql.cql_config import CQLConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import CQL

__all__ = ["CQL", "CQLConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, CQL="rlzmq.algorithms.classes")
