"""BC: behavior cloning, the log-likelihood of recorded actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.bc.bc_config import BCConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import BC

__all__ = ["BC", "BCConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, BC="rlzmq.algorithms.classes")
