"""BC: behavior cloning, the log-likelihood of recorded actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlzmq.algorithms.off_policy import OfflineConfig
from rlzmq.config.groups import TrainingSettings
from rlzmq.config.settings import NonNegative, fixed, settings, takes
from rlzmq.core.imports import LazyModule

if TYPE_CHECKING:
    from rlzmq.algorithms.classes import BC as BC

__all__ = [
    "BC",
    "BCConfig",
    "BCTrainingSettings",
]


@settings
class BCTrainingSettings(TrainingSettings):
    """BC's settings, in addition to those of `AlgorithmConfig.training`.

    Args:
        beta: Must be 0: steps are not weighted.
    """

    beta: NonNegative = fixed(
        default=0.0, instead="use MARWILConfig, which weights steps by their advantages."
    )


class BCConfig(OfflineConfig, BCTrainingSettings):
    """Settings of BC, with RLlib's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {"lr": 1e-4, "train_batch_size": 2000}
    _algorithm: ClassVar[str] = "BC"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.bc.bc_learner:BCLearner"
    _module_class: ClassVar[str] = "rlzmq.modules.default_models.actor_critic:DefaultPPOTorchRLModule"
    _model_defaults: ClassVar[dict[str, Any]] = {"vf_share_layers": False}

    @takes(BCTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `BCTrainingSettings`."""
        return self


__getattr__ = LazyModule("rlzmq.algorithms.classes").__getattr__
