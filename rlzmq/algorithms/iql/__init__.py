"""IQL: implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.iql.iql_config import IQLConfig as IQLConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import IQL as IQL

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
