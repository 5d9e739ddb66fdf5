"""IQL: learns values of recorded actions only, and imitates the better actions."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.iql.iql_config import IQLConfig

__all__ = ["IQL"]


class IQL(Algorithm):
    """IQL (arXiv:2110.06169). A training step is one update on batches of recorded steps."""

    config_class = IQLConfig
