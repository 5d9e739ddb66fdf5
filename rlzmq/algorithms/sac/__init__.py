"""SAC: soft actor-critic (Haarnoja et al. 2018, arXiv:1801.01290, arXiv:1812.05905)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from rlzmq.algorithms.off_policy import OffPolicyConfig, OffPolicySettings, check_no_lr
from rlzmq.config.settings import LearningRate, Positive, settings, takes

__all__ = ["SACConfig", "SACTrainingSettings"]


@settings
class SACTrainingSettings(OffPolicySettings):
    """SAC's settings, in addition to those of `OffPolicyConfig`.

    Args:
        actor_lr, critic_lr, alpha_lr: Learning rates of policy, critics and temperature, or schedules over lifetime env
            steps.
        lr: Must be None: see the three above.
        twin_q: Whether there are two critics, whose lower value counts (arXiv:1802.09477).
        initial_alpha: Initial temperature α, the weight of the entropy.
        target_entropy: Entropy to which the temperature steers the policy, in nats. "auto" or None: minus the number of
            dimensions of a Box, ``0.98 log |A|`` for Discrete actions.
        td_error_loss_fn: The critics' loss: "mse", or "huber" (with δ = 1, as in RLlib), which lets rare large rewards
            count less, so that critics learn something between the mean of returns and their median.
    """

    actor_lr: LearningRate = 3e-4
    critic_lr: LearningRate = 3e-4
    alpha_lr: LearningRate = 3e-4
    lr: LearningRate | None = None  # type: ignore[assignment]
    twin_q: bool = True
    initial_alpha: Positive = 1.0
    target_entropy: float | Literal["auto"] | None = "auto"
    td_error_loss_fn: Literal["mse", "huber"] = "mse"


class SACConfig(OffPolicyConfig, SACTrainingSettings):
    """Settings of SAC, with RLlib's defaults but for `actor_lr` (RLlib: 3e-5) and `td_error_loss_fn` ("huber")."""

    _defaults: ClassVar[dict[str, Any]] = {
        "train_batch_size": 256,
        "replay_buffer_config": {**OffPolicyConfig._defaults["replay_buffer_config"], "capacity": 1_000_000},
        "num_steps_sampled_before_learning_starts": 1500,
        "target_network_update_freq": 0,
        "tau": 0.005,
        "adam_epsilon": 1e-7,
        "min_time_s_per_iteration": 1.0,
        "min_sample_timesteps_per_iteration": 100,
    }
    _algorithm: ClassVar[str] = "SAC"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.sac.sac_learner:SACLearner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.sac.sac_module:DefaultSACModule"
    _model_setting_names: ClassVar[tuple[str, ...]] = ("twin_q", "initial_alpha")

    @takes(SACTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `SACTrainingSettings`."""
        return self

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        check_no_lr(self, "actor_lr, critic_lr and alpha_lr")
