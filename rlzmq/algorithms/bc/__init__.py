"""BC: behavior cloning, the log-likelihood of recorded actions."""

from typing import TYPE_CHECKING

from rlzmq.algorithms.bc.bc_config import BCConfig as BCConfig
from rlzmq.core.lazy import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import BC as BC

__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
