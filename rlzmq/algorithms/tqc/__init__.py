"""TQC: truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.tqc.tqc_config import TQCConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.tqc.tqc import TQC

__all__ = ["TQC", "TQCConfig"]


def __getattr__(name: str) -> Any:
    """Import TQC on first use: it imports torch, which configs do not need."""
    if name != "TQC":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.tqc.tqc import TQC

    return TQC
