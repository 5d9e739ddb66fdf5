"""APPOConfig: APPO's settings and their defaults."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from rlzmq.algorithms.impala.impala_config import IMPALAConfig, IMPALATrainingSettings
from rlzmq.config.settings import Fraction, NonNegative, PositiveInt, settings, takes

__all__ = ["APPOConfig", "APPOTrainingSettings"]


@settings
class APPOTrainingSettings(IMPALATrainingSettings):
    """APPO's own settings, and those of `IMPALAConfig.training`.

    Args:
        clip_param: The surrogate's clip range around a probability ratio of 1.
        use_kl_loss: Add the KL divergence from the target policy to the trained one to the loss.
        kl_coeff: Its first coefficient; ×1.5 above twice `kl_target`, ×0.5 below half of it, per update.
        kl_target: The KL divergence that the coefficient aims at.
        target_network_update_freq: Updates of the target network are this many rounds apart; in a round
            ``circular_buffer_num_batches * circular_buffer_iterations_per_batch *
            train_batch_size_per_learner`` env steps are trained, repetitions counted (without a circular
            buffer, ``train_batch_size_per_learner``).
        tau: Each moves the target network this far towards the trained one, in [0, 1].
        use_circular_buffer: Train each batch several times (arXiv:1912.00167); else once.
        circular_buffer_num_batches: How many batches are kept.
        circular_buffer_iterations_per_batch: How often each is trained at most.
    """

    clip_param: NonNegative = 0.4
    use_kl_loss: bool = False
    kl_coeff: NonNegative = 1.0
    kl_target: NonNegative = 0.01
    target_network_update_freq: PositiveInt = 2
    tau: Fraction = 1.0
    use_circular_buffer: bool = True
    circular_buffer_num_batches: PositiveInt = 8
    circular_buffer_iterations_per_batch: PositiveInt = 2


class APPOConfig(IMPALAConfig, APPOTrainingSettings):
    """Settings of APPO; defaults as in RLlib."""

    _algorithm: ClassVar[str] = "APPO"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.appo.appo_learner:APPOLearner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.appo.appo_module:DefaultAPPOModule"

    @takes(APPOTrainingSettings)
    def training(self) -> Self:
        """Set how to learn: see `APPOTrainingSettings`."""
        return self

    @property
    def _default_model_config(self) -> dict[str, Any]:
        return {"vf_share_layers": False}
