"""TQC: truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.tqc.tqc_config import TQCConfig
from rlzmq.core.lazy import GetName, lazy_names

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import TQC

__all__ = ["TQC", "TQCConfig"]

# These import torch, which configs do not need.
__getattr__: GetName = lazy_names(__name__, TQC="rlzmq.algorithms.classes")
