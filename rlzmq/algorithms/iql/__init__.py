"""IQL: implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.iql.iql_config import IQLConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.iql.iql import IQL

__all__ = ["IQL", "IQLConfig"]


def __getattr__(name: str) -> Any:
    """Import IQL on first use: it imports torch, which configs do not need."""
    if name != "IQL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.iql.iql import IQL

    return IQL
