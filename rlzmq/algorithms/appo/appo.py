"""APPO: runners sample ahead of the learner, whose objective is clipped against a target network."""

from __future__ import annotations

from typing import ClassVar

from rlzmq.algorithms.appo.appo_config import APPOConfig
from rlzmq.algorithms.impala.impala import IMPALA

__all__ = ["APPO"]


class APPO(IMPALA):
    """APPO (arXiv:1912.00167, arXiv:1707.06347)."""

    config_class: ClassVar[type[APPOConfig]] = APPOConfig
