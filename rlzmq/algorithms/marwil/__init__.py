"""MARWIL: imitation weighted by exponential advantages (Wang et al., NeurIPS 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.marwil.marwil_config import MARWILConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import MARWIL

__all__ = ["MARWIL", "MARWILConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, MARWIL="rlzmq.algorithms.classes")
