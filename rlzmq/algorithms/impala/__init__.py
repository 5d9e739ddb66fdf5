"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from rlzmq.algorithms.algorithm_config import AlgorithmConfig
from rlzmq.config.groups import TrainingSettings
from rlzmq.config.settings import NonNegative, Schedule, settings, takes

__all__ = ["IMPALAConfig", "IMPALATrainingSettings"]


@settings
class IMPALATrainingSettings(TrainingSettings):
    """IMPALA's settings, in addition to those of `AlgorithmConfig.training`.

    Args:
        vtrace: Must be True.
        vtrace_clip_rho_threshold: Bound ρ̄ of the importance ratio in the value targets; None: no bound.
        vtrace_clip_pg_rho_threshold: Bound of the importance ratio in the policy gradient; None: no bound.
        vf_loss_coeff: Weight of the value loss.
        entropy_coeff: Weight of the entropy bonus, or a schedule over lifetime env steps.
    """

    vtrace: Literal[True] = True
    vtrace_clip_rho_threshold: NonNegative | None = 1.0
    vtrace_clip_pg_rho_threshold: NonNegative | None = 1.0
    vf_loss_coeff: NonNegative = 0.5
    entropy_coeff: Schedule = 0.01


class IMPALAConfig(AlgorithmConfig, IMPALATrainingSettings):
    """Settings of IMPALA, with RLlib's defaults but for policy and value function, which have an encoder each."""

    _defaults: ClassVar[dict[str, Any]] = {
        "lr": 5e-4,
        "grad_clip": 40.0,
        "num_env_runners": 2,
        "num_learners": 1,
        "train_batch_size": 500,
        "rollout_fragment_length": 50,
        "staleness": 2,
        "min_time_s_per_iteration": 10.0,
    }
    _algorithm: ClassVar[str] = "IMPALA"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.impala.impala_learner:IMPALALearner"
    _model_defaults: ClassVar[dict[str, Any]] = {"vf_share_layers": False}

    @takes(IMPALATrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `IMPALATrainingSettings`."""
        return self
