"""IQL: implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169)."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from rlzmq.algorithms.off_policy import OfflineActorCriticConfig
from rlzmq.config.groups import TrainingSettings
from rlzmq.config.settings import Fraction, LearningRate, NonNegative, NonNegativeInt, settings, takes
from rlzmq.core.errors import ConfigurationError

__all__ = ["IQLConfig", "IQLTrainingSettings"]


@settings
class IQLTrainingSettings(TrainingSettings):
    """IQL's settings, in addition to those of `AlgorithmConfig.training`.

    Args:
        beta: Strength of weighting recorded actions by their advantages, exp(beta · A); 0: equal weights; larger:
            greedier. The paper uses 3 to 10.
        expectile: Expectile of the critics' values that the value function learns, in (0, 1); 0.5: their mean.
        actor_lr, critic_lr, value_lr: Learning rates of policy, critics and value function, or schedules over lifetime
            trained env steps.
        lr: Must be None: see the three above.
        twin_q: Whether there are two critics, whose lower value counts (arXiv:1802.09477).
        target_network_update_freq: Number of trained env steps between updates of the target networks; 0: an update
            after every minibatch.
        tau: Fraction in [0, 1] by which an update moves the target networks towards the trained ones; 1 copies. The
            paper uses 0.005.
    """

    beta: NonNegative = 0.1
    expectile: Fraction = 0.8
    actor_lr: LearningRate = 3e-4
    critic_lr: LearningRate = 3e-4
    value_lr: LearningRate = 3e-4
    lr: LearningRate | None = None  # type: ignore[assignment]
    twin_q: bool = True
    target_network_update_freq: NonNegativeInt = 0
    tau: Fraction = 1.0


class IQLConfig(OfflineActorCriticConfig, IQLTrainingSettings):
    """Settings of IQL, with RLlib's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {"train_batch_size": 2000}
    _algorithm: ClassVar[str] = "IQL"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.iql.iql_learner:IQLLearner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.iql.iql_learner:DefaultIQLModule"
    _model_setting_names: ClassVar[tuple[str, ...]] = ("twin_q",)
    _learning_rates: ClassVar[str] = "actor_lr, critic_lr and value_lr"

    @takes(IQLTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `IQLTrainingSettings`."""
        return self

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        if self.expectile in (0.0, 1.0):
            raise ConfigurationError(
                f"config.expectile={self.expectile}: expected a number between 0 and 1, both excluded. The larger, the "
                "nearer are the values to those of the best recorded actions; 0.5 to 0.9 are usual."
            )
