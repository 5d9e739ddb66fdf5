"""MARWIL: imitation weighted by exponential advantages (Wang et al., NeurIPS 2018)."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from rlzmq.algorithms.off_policy import OfflineConfig
from rlzmq.config.groups import TrainingSettings
from rlzmq.config.settings import Fraction, NonNegative, NonNegativeInt, settings, takes

__all__ = ["MARWILConfig", "MARWILTrainingSettings"]


@settings
class MARWILTrainingSettings(TrainingSettings):
    """MARWIL's settings, in addition to those of `AlgorithmConfig.training`.

    Args:
        beta: Strength of weighting steps by their advantages, in [0, 1]; 0: equal weights.
        vf_coeff: Weight of the value loss.
        moving_average_sqd_adv_norm_start: Initial value of c², the moving average of squared advantages.
        moving_average_sqd_adv_norm_update_rate: Rate at which each minibatch moves it.
        lambda_: λ of the value targets in [0, 1]; 1: the discounted returns of the recorded episodes.
        bc_logstd_coeff: Weight of the policy's mean log standard deviation, which is added to the log-likelihood, so
            that Box policies keep exploring.
        burnin_len: For stateful modules, the number of steps before each of an episode's sequences except the first,
            less than ``max_seq_len``; they warm up the state and are not trained there.
    """

    beta: Fraction = 1.0
    vf_coeff: NonNegative = 1.0
    moving_average_sqd_adv_norm_start: NonNegative = 100.0
    moving_average_sqd_adv_norm_update_rate: Fraction = 1e-8
    lambda_: Fraction = 1.0
    bc_logstd_coeff: NonNegative = 0.0
    burnin_len: NonNegativeInt = 0


class MARWILConfig(OfflineConfig, MARWILTrainingSettings):
    """Settings of MARWIL, with RLlib's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {"lr": 1e-4, "train_batch_size": 2000}
    _algorithm: ClassVar[str] = "MARWIL"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.marwil.marwil_learner:MARWILLearner"
    _module_class: ClassVar[str] = "rlzmq.modules.default_models.actor_critic:DefaultPPOTorchRLModule"
    _model_defaults: ClassVar[dict[str, Any]] = {"vf_share_layers": False}

    @takes(MARWILTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `MARWILTrainingSettings`."""
        return self
