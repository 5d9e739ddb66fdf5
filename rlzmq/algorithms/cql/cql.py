"""CQL: SAC on recorded data, with critics that give unseen actions low values."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.cql.cql_config import CQLConfig

__all__ = ["CQL"]


class CQL(Algorithm):
    """CQL (arXiv:2006.04779). A training step is one update on batches of recorded steps."""

    config_class = CQLConfig
