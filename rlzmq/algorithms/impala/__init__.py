"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.impala.impala_config import IMPALAConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.impala.impala import IMPALA

__all__ = ["IMPALA", "IMPALAConfig"]


def __getattr__(name: str) -> Any:
    """IMPALA, which brings torch, when it is used: a config is made and checked without it."""
    if name != "IMPALA":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.impala.impala import IMPALA

    return IMPALA
