"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.impala.impala_config import IMPALAConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.impala.impala import IMPALA

__all__ = ["IMPALA", "IMPALAConfig"]


def __getattr__(name: str) -> Any:
    """Import IMPALA on first use: it imports torch, which configs do not need."""
    if name != "IMPALA":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.impala.impala import IMPALA

    return IMPALA
