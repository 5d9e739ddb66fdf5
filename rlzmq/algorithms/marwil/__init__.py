"""MARWIL: imitation weighted by exponential advantages (Wang et al., NeurIPS 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.marwil.marwil_config import MARWILConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.marwil.marwil import MARWIL

__all__ = ["MARWIL", "MARWILConfig"]


def __getattr__(name: str) -> Any:
    """Import MARWIL on first use: it imports torch, which configs do not need."""
    if name != "MARWIL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.marwil.marwil import MARWIL

    return MARWIL
