"""BC: clones the policy that recorded the data."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.bc.bc_config import BCConfig

__all__ = ["BC"]


class BC(Algorithm):
    """Behavior cloning. A training step is one update on batches of recorded steps."""

    config_class = BCConfig
