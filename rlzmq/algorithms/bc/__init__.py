"""BC: behavior cloning, the log-likelihood of recorded actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rlzmq.algorithms.off_policy import OfflineConfig
from rlzmq.core.imports import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import BC as BC

__all__ = [
    "BC",
    "BCConfig",
]


class BCConfig(OfflineConfig):
    """Settings of BC, with RLlib's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {"lr": 1e-4, "train_batch_size": 2000}
    _algorithm: ClassVar[str] = "BC"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.bc.bc_learner:BCLearner"
    _module_class: ClassVar[str] = "rlzmq.modules.default_models.actor_critic:DefaultPPOTorchRLModule"
    _model_defaults: ClassVar[dict[str, Any]] = {"vf_share_layers": False}


__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
