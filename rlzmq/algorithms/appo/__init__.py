"""APPO: PPO's clipped objective on IMPALA's architecture (IMPACT: Luo et al. 2019, arXiv:1912.00167)."""

from __future__ import annotations

from typing import ClassVar, Self

from rlzmq.algorithms.impala import IMPALAConfig, IMPALATrainingSettings
from rlzmq.config.settings import Fraction, NonNegative, PositiveInt, settings, takes

__all__ = ["APPOConfig", "APPOTrainingSettings"]


@settings
class APPOTrainingSettings(IMPALATrainingSettings):
    """APPO's settings, in addition to those of `IMPALAConfig.training`.

    Args:
        clip_param: The surrogate's clip range around a probability ratio of 1.
        use_kl_loss: Whether to add the KL divergence from the target policy to the trained policy to the loss.
        kl_coeff: Initial coefficient of that term. After each update it is multiplied by 1.5 if the divergence
            exceeds twice `kl_target`, and by 0.5 if it is below half of `kl_target`.
        kl_target: Target of the KL divergence.
        target_network_update_freq: Number of rounds between updates of the target network. A round is
            ``circular_buffer_num_batches * circular_buffer_iterations_per_batch *
            train_batch_size_per_learner`` trained env steps, counting repetitions (without a circular
            buffer: ``train_batch_size_per_learner``).
        tau: Fraction in [0, 1] by which an update moves the target network towards the trained network.
        use_circular_buffer: Whether to train on each batch several times (arXiv:1912.00167) instead of once.
        circular_buffer_num_batches: Number of batches in the circular buffer.
        circular_buffer_iterations_per_batch: Maximum number of times that each batch is trained.
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
    """Settings of APPO, with RLlib's defaults."""

    _algorithm: ClassVar[str] = "APPO"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.appo.appo_learner:APPOLearner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.appo.appo_learner:DefaultAPPOModule"

    @takes(APPOTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `APPOTrainingSettings`."""
        return self
