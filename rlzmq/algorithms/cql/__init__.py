"""CQL: conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.cql.cql_config import CQLConfig as CQLConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import CQL as CQL

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
