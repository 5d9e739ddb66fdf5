"""TQC: SAC with critics that predict distributions of returns."""

from __future__ import annotations

from typing import ClassVar

from rlzmq.algorithms.sac.sac import SAC
from rlzmq.algorithms.tqc.tqc_config import TQCConfig

__all__ = ["TQC"]


class TQC(SAC):
    """TQC (arXiv:2005.04269)."""

    config_class: ClassVar[type[TQCConfig]] = TQCConfig
