"""MARWIL: imitation weighted by exponential advantages (Wang et al., NeurIPS 2018)."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.marwil.marwil_config import MARWILConfig as MARWILConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import MARWIL as MARWIL

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
