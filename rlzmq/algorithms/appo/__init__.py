"""APPO: PPO's clipped objective on IMPALA's architecture (IMPACT: Luo et al. 2019, arXiv:1912.00167)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.appo.appo_config import APPOConfig

if TYPE_CHECKING:
    from rlzmq.algorithms.appo.appo import APPO

__all__ = ["APPO", "APPOConfig"]


def __getattr__(name: str) -> Any:
    """Import APPO on first use: it imports torch, which configs do not need."""
    if name != "APPO":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlzmq.algorithms.appo.appo import APPO

    return APPO
