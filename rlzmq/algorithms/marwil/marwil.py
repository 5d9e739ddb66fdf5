"""MARWIL: imitates the better part of recorded behavior."""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.marwil.marwil_config import MARWILConfig

__all__ = ["MARWIL"]


class MARWIL(Algorithm):
    """MARWIL (Wang et al., NeurIPS 2018). A training step is one update on batches of whole recorded episodes."""

    config_class = MARWILConfig
