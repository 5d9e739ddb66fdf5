"""SAC: a stochastic policy trained for return and entropy, from a replay buffer."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.sac.sac_config import SACConfig

__all__ = ["SAC"]


class SAC(Algorithm):
    """SAC (arXiv:1812.05905). A training step is one update according to `update_plan()`."""

    config_class = SACConfig
