"""BC: behaviour cloning, the log-likelihood of recorded actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.bc.bc_config import BCConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.bc.bc import BC

__all__ = ["BC", "BCConfig"]


def __getattr__(name: str) -> Any:
    """Import BC on first use: it imports torch, which configs do not need."""
    if name != "BC":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.bc.bc import BC

    return BC
