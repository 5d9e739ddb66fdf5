"""CQL: conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from rlzmq.algorithms.off_policy import OfflineActorCriticConfig
from rlzmq.config.groups import TrainingSettings
from rlzmq.config.settings import (
    Fraction,
    LearningRate,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    settings,
    takes,
)

__all__ = ["CQLConfig", "CQLTrainingSettings"]


@settings
class CQLTrainingSettings(TrainingSettings):
    """CQL's settings, in addition to those of `AlgorithmConfig.training`.

    Args:
        actor_lr, critic_lr, alpha_lr: Learning rates of policy, critics and temperature, or schedules over lifetime
            trained env steps.
        lr: Must be None: see the three above.
        twin_q, initial_alpha, target_entropy, td_error_loss_fn: See `SACConfig.training`.
        target_network_update_freq: Number of trained env steps between updates of the target networks; 0: an update
            after every minibatch.
        tau: Fraction in [0, 1] by which an update moves the target networks towards the trained ones.
        bc_iters: Number of minibatches at the start in which the policy imitates the data instead of following the
            critics.
        temperature: Temperature of the penalty's soft maximum.
        num_actions: Number of actions in the soft maximum, for each step and kind (uniform, from the policy at this
            step and at the next one).
        min_q_weight: Weight of the penalty.
        deterministic_backup: Whether targets leave out the entropy of the next action.
    """

    actor_lr: LearningRate = 1e-4
    critic_lr: LearningRate = 1e-3
    alpha_lr: LearningRate = 1e-3
    lr: LearningRate | None = None  # type: ignore[assignment]
    twin_q: bool = True
    initial_alpha: Positive = 1.0
    target_entropy: float | Literal["auto"] | None = "auto"
    td_error_loss_fn: Literal["mse", "huber"] = "mse"
    target_network_update_freq: NonNegativeInt = 0
    tau: Fraction = 0.005
    bc_iters: NonNegativeInt = 20_000
    temperature: Positive = 1.0
    num_actions: PositiveInt = 10
    min_q_weight: NonNegative = 5.0
    deterministic_backup: bool = True


class CQLConfig(OfflineActorCriticConfig, CQLTrainingSettings):
    """Settings of CQL, with RLlib's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {"train_batch_size": 256}
    _algorithm: ClassVar[str] = "CQL"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.cql.cql_learner:CQLLearner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.cql.cql_learner:DefaultCQLModule"
    _model_setting_names: ClassVar[tuple[str, ...]] = ("twin_q", "initial_alpha")
    _learning_rates: ClassVar[str] = "actor_lr, critic_lr and alpha_lr"

    @takes(CQLTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `CQLTrainingSettings`."""
        return self
