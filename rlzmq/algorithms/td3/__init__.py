"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from rlzmq.algorithms.off_policy import OffPolicyConfig, OffPolicySettings, check_no_lr
from rlzmq.config.settings import LearningRate, NonNegative, PositiveInt, settings, takes

__all__ = ["TD3Config", "TD3TrainingSettings"]


@settings
class TD3TrainingSettings(OffPolicySettings):
    """TD3's settings, in addition to those of `OffPolicyConfig`. Actions lie in (-1, 1), and so do noises.

    Args:
        actor_lr, critic_lr: Learning rates of policy and critics, or schedules over lifetime env steps.
        lr: Must be None: see the two above.
        twin_q: Whether there are two critics, whose lower value counts in targets.
        policy_delay: The policy and the target networks follow every so many minibatches.
        exploration_noise: Standard deviation of the noise on actions while exploring, or a schedule over the run's
            lifetime env steps.
        target_noise: Standard deviation of the noise on the target policy's actions.
        target_noise_clip: Largest such noise.
        td_error_loss_fn: The critics' loss: "mse", or "huber" (with δ = 1).
    """

    actor_lr: LearningRate = 3e-4
    critic_lr: LearningRate = 3e-4
    lr: LearningRate | None = None  # type: ignore[assignment]
    twin_q: bool = True
    policy_delay: PositiveInt = 2
    exploration_noise: LearningRate = 0.1
    target_noise: NonNegative = 0.2
    target_noise_clip: NonNegative = 0.5
    td_error_loss_fn: Literal["mse", "huber"] = "mse"


class TD3Config(OffPolicyConfig, TD3TrainingSettings):
    """Settings of TD3, with the paper's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {
        "train_batch_size": 256,
        "replay_buffer_config": {
            **OffPolicyConfig._defaults["replay_buffer_config"],
            "type": "EpisodeReplayBuffer",
            "capacity": 1_000_000,
        },
        "num_steps_sampled_before_learning_starts": 1500,
        "target_network_update_freq": 0,
        "tau": 0.005,
        "adam_epsilon": 1e-7,
        "min_time_s_per_iteration": 1.0,
        "min_sample_timesteps_per_iteration": 100,
        "evaluation_config": {"explore": False},
    }
    _algorithm: ClassVar[str] = "TD3"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.td3.td3_learner:TD3Learner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.td3.td3_module:DefaultTD3Module"
    _model_setting_names: ClassVar[tuple[str, ...]] = ("twin_q", "exploration_noise")

    @takes(TD3TrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `TD3TrainingSettings`."""
        return self

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        check_no_lr(self, "actor_lr and critic_lr")
