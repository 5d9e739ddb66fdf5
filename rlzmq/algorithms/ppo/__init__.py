"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from rlzmq.algorithms.algorithm_config import AlgorithmConfig
from rlzmq.config.groups import TrainingSettings
from rlzmq.config.settings import Fraction, NonNegative, Positive, Schedule, settings, takes
from rlzmq.core.errors import ConfigurationError

__all__ = ["PPOConfig", "PPOTrainingSettings"]


@settings
class PPOTrainingSettings(TrainingSettings):
    """PPO's settings, in addition to those of `AlgorithmConfig.training`.

    Args:
        use_critic: Whether to train a value function and use it as a baseline.
        use_gae: Whether to use generalized advantage estimation (arXiv:1506.02438); needs the critic.
        lambda_: GAE's λ in [0, 1].
        use_kl_loss: Whether to add the KL divergence from the sampling policy to the trained policy to the loss.
        kl_coeff: Initial coefficient of that term. After each update it is multiplied by 1.5 if the divergence
            exceeds twice `kl_target`, and by 0.5 if it is below half of `kl_target`.
        kl_target: Target of the KL divergence per update.
        vf_loss_coeff: Weight of the value loss.
        entropy_coeff: Weight of the entropy bonus, or a schedule over lifetime env steps.
        clip_param: The surrogate's clip range around 1.
        vf_clip_param: Bound on the squared value error, beyond which a row has no gradient; None: no bound.
        vf_clip_change: Bound on how far a value may move from the one before the update: the loss is the larger one of
            the errors of the value and of the bounded value; None: no bound.
        target_kl: The update ends with the first epoch in which an estimate of the KL divergence from the sampling
            policy exceeds 1.5 times this number; None: it never ends early.
        standardize_advantages: Rows over which the mean and standard deviation of the advantages are computed.
            "real_steps": the batch's rows that are trained on; "minibatch": those of each minibatch; "as_rllib": the
            same rows as in RLlib, to compare results number by number.
    """

    use_critic: bool = True
    use_gae: bool = True
    lambda_: Fraction = 1.0
    use_kl_loss: bool = True
    kl_coeff: NonNegative = 0.2
    kl_target: NonNegative = 0.01
    vf_loss_coeff: NonNegative = 1.0
    entropy_coeff: Schedule = 0.0
    clip_param: NonNegative = 0.3
    vf_clip_param: NonNegative | None = None
    vf_clip_change: Positive | None = None
    target_kl: Positive | None = None
    standardize_advantages: Literal["real_steps", "minibatch", "as_rllib"] = "real_steps"


class PPOConfig(AlgorithmConfig, PPOTrainingSettings):
    """Settings of PPO, with RLlib's defaults, but that the value loss is not clipped."""

    _defaults: ClassVar[dict[str, Any]] = {
        "lr": 5e-5,
        "num_env_runners": 2,
        "train_batch_size": 4000,
        "num_epochs": 30,
        "minibatch_size": 128,
        "shuffle_batch_per_epoch": True,
    }
    _algorithm: ClassVar[str] = "PPO"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.ppo.ppo_learner:PPOLearner"
    _module_class: ClassVar[str] = "rlzmq.modules.default_models.actor_critic:DefaultPPOTorchRLModule"
    _model_defaults: ClassVar[dict[str, Any]] = {"vf_share_layers": False}

    @takes(PPOTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `PPOTrainingSettings`."""
        return self

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        if self.use_gae and not self.use_critic:
            raise ConfigurationError(
                "config.use_gae=True needs config.use_critic=True: advantages are estimated with the value function. "
                "Set .training(use_gae=False), too."
            )
