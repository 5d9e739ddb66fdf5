"""IMPALAConfig: IMPALA's settings and their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from rlzmq.algorithms.algorithm_config import AlgorithmConfig
from rlzmq.algorithms.settings import NonNegative, NotProvided, Schedule, setter
from rlzmq.algorithms.training_settings import TrainingSettings

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm import Algorithm

__all__ = ["IMPALAConfig", "IMPALATrainingSettings"]

_IMPALA_DEFAULTS: dict[str, Any] = {
    "vtrace": True,
    "vtrace_clip_rho_threshold": 1.0,
    "vtrace_clip_pg_rho_threshold": 1.0,
    "vf_loss_coeff": 0.5,
    "entropy_coeff": 0.01,
    # what IMPALA sets otherwise than the base
    "lr": 5e-4,
    "grad_clip": 40.0,
    "num_env_runners": 2,
    "num_learners": 1,
    "train_batch_size": 500,
    "rollout_fragment_length": 50,
    "staleness": 2,
    "min_time_s_per_iteration": 10.0,
}


class IMPALATrainingSettings(TrainingSettings, total=False):
    """The settings of `IMPALAConfig.training`, for its subclasses."""

    vtrace: Literal[True]
    vtrace_clip_rho_threshold: NonNegative | None
    vtrace_clip_pg_rho_threshold: NonNegative | None
    vf_loss_coeff: NonNegative
    entropy_coeff: Schedule


class IMPALAConfig(AlgorithmConfig):
    """Settings of IMPALA; defaults as in RLlib."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class)
        self._default(**_IMPALA_DEFAULTS)

    @setter
    def training(
        self,
        *,
        vtrace: Literal[True] = NotProvided,
        vtrace_clip_rho_threshold: NonNegative | None = NotProvided,
        vtrace_clip_pg_rho_threshold: NonNegative | None = NotProvided,
        vf_loss_coeff: NonNegative = NotProvided,
        entropy_coeff: Schedule = NotProvided,
        **inherited: Unpack[TrainingSettings],
    ) -> Self:
        """IMPALA's own settings, and those of `AlgorithmConfig.training`.

        Args:
            vtrace: Only True.
            vtrace_clip_rho_threshold: ρ̄, bound of the importance ratio in the value targets; None: no bound.
            vtrace_clip_pg_rho_threshold: Bound of the ratio in the policy gradient; None: no bound.
            vf_loss_coeff: Weight of the value loss.
            entropy_coeff: Weight of the entropy bonus, or a schedule over lifetime env steps.
        """
        return self

    def _default_algo_class(self) -> Any:
        from rlzmq.algorithms.impala.impala import IMPALA

        return IMPALA

    def get_default_learner_class(self) -> Any:
        """IMPALALearner."""
        from rlzmq.algorithms.impala.impala_learner import IMPALALearner

        return IMPALALearner
