"""PPOConfig: PPO's settings and their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from rlzmq.algorithms.algorithm_config import AlgorithmConfig
from rlzmq.algorithms.settings import Fraction, NonNegative, NotProvided, Schedule, setter
from rlzmq.algorithms.training_settings import TrainingSettings
from rlzmq.core.errors import ConfigurationError

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm import Algorithm

__all__ = ["PPOConfig"]

_PPO_DEFAULTS: dict[str, Any] = {
    "use_critic": True,
    "use_gae": True,
    "lambda_": 1.0,
    "use_kl_loss": True,
    "kl_coeff": 0.2,
    "kl_target": 0.01,
    "vf_loss_coeff": 1.0,
    "entropy_coeff": 0.0,
    "clip_param": 0.3,
    "vf_clip_param": 10.0,
    "standardize_advantages": "real_steps",
    # what PPO sets otherwise than the base
    "lr": 5e-5,
    "num_env_runners": 2,
    "train_batch_size": 4000,
    "num_epochs": 30,
    "minibatch_size": 128,
    "shuffle_batch_per_epoch": True,
}


class PPOConfig(AlgorithmConfig):
    """Settings of PPO; defaults as in RLlib."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class)
        self._default(**_PPO_DEFAULTS)

    @setter
    def training(
        self,
        *,
        use_critic: bool = NotProvided,
        use_gae: bool = NotProvided,
        lambda_: Fraction = NotProvided,
        use_kl_loss: bool = NotProvided,
        kl_coeff: NonNegative = NotProvided,
        kl_target: NonNegative = NotProvided,
        vf_loss_coeff: NonNegative = NotProvided,
        entropy_coeff: Schedule = NotProvided,
        clip_param: NonNegative = NotProvided,
        vf_clip_param: NonNegative | None = NotProvided,
        standardize_advantages: Literal["real_steps", "as_rllib"] = NotProvided,
        **inherited: Unpack[TrainingSettings],
    ) -> Self:
        """PPO's own settings, and those of `AlgorithmConfig.training`.

        Args:
            use_critic: Train a value function and use it as baseline.
            use_gae: Generalised advantage estimation (arXiv:1506.02438); needs the critic.
            lambda_: GAE's λ in [0, 1].
            use_kl_loss: Add the KL divergence to the old policy to the loss.
            kl_coeff: Its first coefficient; doubles and halves by half steps around `kl_target`.
            kl_target: The KL divergence per update that the coefficient aims at.
            vf_loss_coeff: Weight of the value loss.
            entropy_coeff: Weight of the entropy bonus, or a schedule over lifetime env steps.
            clip_param: The surrogate's clip range around 1.
            vf_clip_param: Bound on the squared value error; None: no bound.
            standardize_advantages: Over which rows of a batch the advantages' mean and deviation are taken: those that
                are trained on, or, to compare results number for number, RLlib's.
        """
        return self

    def _default_algo_class(self) -> Any:
        from rlzmq import PPO  # what goes wrong in that import is said in words

        return PPO

    def get_default_learner_class(self) -> Any:
        """PPOTorchLearner."""
        from rlzmq.algorithms.ppo.ppo_learner import PPOTorchLearner

        return PPOTorchLearner

    def get_default_rl_module_spec(self) -> Any:
        """A spec of DefaultPPOTorchRLModule."""
        from rlzmq.modules.default_models.actor_critic import DefaultPPOTorchRLModule
        from rlzmq.modules.spec import RLModuleSpec

        return RLModuleSpec(module_class=DefaultPPOTorchRLModule)

    @property
    def _default_model_config(self) -> dict[str, Any]:
        return {"vf_share_layers": False}

    def validate(self) -> None:
        """As AlgorithmConfig.validate, and: generalised advantages need the critic.

        Raises:
            ConfigurationError: Names the settings that do not fit together.
        """
        super().validate()
        if self._validate_config and self.use_gae and not self.use_critic:
            raise ConfigurationError(
                "config.use_gae=True needs config.use_critic=True: advantages are estimated with the value function. "
                "Set .training(use_gae=False) too."
            )
