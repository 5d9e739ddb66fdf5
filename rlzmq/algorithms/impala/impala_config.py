"""IMPALAConfig: IMPALA's settings and their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from rlzmq.algorithms.algorithm_config import AlgorithmConfig, Connector
from rlzmq.algorithms.settings import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    NotProvided,
    PositiveInt,
    Schedule,
    setter,
)

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm import Algorithm

__all__ = ["IMPALAConfig"]

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
        gamma: Fraction = NotProvided,
        lr: Schedule = NotProvided,
        grad_clip: NonNegative | None = NotProvided,
        grad_clip_by: Literal["value", "norm", "global_norm"] = NotProvided,
        train_batch_size: PositiveInt = NotProvided,
        train_batch_size_per_learner: PositiveInt | None = NotProvided,
        num_epochs: PositiveInt = NotProvided,
        minibatch_size: PositiveInt | None = NotProvided,
        shuffle_batch_per_epoch: bool = NotProvided,
        staleness: NonNegativeInt = NotProvided,
        learner_class: type | None = NotProvided,
        learner_connector: Connector = NotProvided,
    ) -> Self:
        """IMPALA's own settings, and those of `AlgorithmConfig.training`.

        The inherited ones are named here again, so that editors and type checkers know them.

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
