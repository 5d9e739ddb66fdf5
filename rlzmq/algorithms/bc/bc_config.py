"""BCConfig: settings of behavior cloning and their defaults."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from rlzmq.algorithms.offline_config import OfflineConfig
from rlzmq.config.learning import TrainingSettings
from rlzmq.config.settings import NonNegative, fixed, settings, takes

__all__ = ["BCConfig", "BCTrainingSettings"]


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
