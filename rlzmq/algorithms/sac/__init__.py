"""SAC: soft actor-critic (Haarnoja et al. 2018, arXiv:1801.01290, arXiv:1812.05905)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.sac.sac_config import SACConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.sac.sac import SAC

__all__ = ["SAC", "SACConfig"]


def __getattr__(name: str) -> Any:
    """Import SAC on first use: it imports torch, which configs do not need."""
    if name != "SAC":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.sac.sac import SAC

    return SAC
