"""BC: behavior cloning, the log-likelihood of recorded actions."""

from __future__ import annotations

from typing import Any, ClassVar

from rlzmq.algorithms.off_policy import OfflineConfig

__all__ = ["BCConfig"]


class BCConfig(OfflineConfig):
    """Settings of BC, with RLlib's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {"lr": 1e-4, "train_batch_size": 2000}
    _algorithm: ClassVar[str] = "BC"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.bc.bc_learner:BCLearner"
    _module_class: ClassVar[str] = "rlzmq.modules.default_models.actor_critic:DefaultPPOTorchRLModule"
    _model_defaults: ClassVar[dict[str, Any]] = {"vf_share_layers": False}
