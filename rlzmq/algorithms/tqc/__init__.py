"""TQC: truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.tqc.tqc_config import TQCConfig as TQCConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import TQC as TQC

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
