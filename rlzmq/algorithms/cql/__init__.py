"""CQL: conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.cql.cql_config import CQLConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.cql.cql import CQL

__all__ = ["CQL", "CQLConfig"]


def __getattr__(name: str) -> Any:
    """Import CQL on first use: it imports torch, which configs do not need."""
    if name != "CQL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.cql.cql import CQL

    return CQL
