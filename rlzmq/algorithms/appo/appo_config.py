"""APPOConfig: APPO's settings and their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, Unpack

from rlzmq.algorithms.impala.impala_config import IMPALAConfig, IMPALATrainingSettings
from rlzmq.algorithms.settings import Fraction, NonNegative, NotProvided, PositiveInt, setter

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm import Algorithm

__all__ = ["APPOConfig"]

_APPO_DEFAULTS: dict[str, Any] = {
    "clip_param": 0.4,
    "use_kl_loss": False,
    "kl_coeff": 1.0,
    "kl_target": 0.01,
    "target_network_update_freq": 2,
    "tau": 1.0,
    "use_circular_buffer": True,
    "circular_buffer_num_batches": 8,
    "circular_buffer_iterations_per_batch": 2,
}


class APPOConfig(IMPALAConfig):
    """Settings of APPO; defaults as in RLlib."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class)
        self._default(**_APPO_DEFAULTS)

    @setter
    def training(
        self,
        *,
        clip_param: NonNegative = NotProvided,
        use_kl_loss: bool = NotProvided,
        kl_coeff: NonNegative = NotProvided,
        kl_target: NonNegative = NotProvided,
        target_network_update_freq: PositiveInt = NotProvided,
        tau: Fraction = NotProvided,
        use_circular_buffer: bool = NotProvided,
        circular_buffer_num_batches: PositiveInt = NotProvided,
        circular_buffer_iterations_per_batch: PositiveInt = NotProvided,
        **inherited: Unpack[IMPALATrainingSettings],
    ) -> Self:
        """APPO's own settings, and those of `IMPALAConfig.training`.

        Args:
            clip_param: The surrogate's clip range around a probability ratio of 1.
            use_kl_loss: Add the KL divergence from the target policy to the trained one to the loss.
            kl_coeff: Its first coefficient; ×1.5 above twice `kl_target`, ×0.5 below half of it, per update.
            kl_target: The KL divergence that the coefficient aims at.
            target_network_update_freq: Updates of the target network are this many rounds apart; in a round
                ``circular_buffer_num_batches * circular_buffer_iterations_per_batch *
                train_batch_size_per_learner`` env steps are trained, repetitions counted (without a circular
                buffer, ``train_batch_size_per_learner``).
            tau: Each moves the target network this far towards the trained one, in [0, 1].
            use_circular_buffer: Train each batch several times (arXiv:1912.00167); else once.
            circular_buffer_num_batches: How many batches are kept.
            circular_buffer_iterations_per_batch: How often each is trained at most.
        """
        return self

    def _default_algo_class(self) -> Any:
        from rlzmq.algorithms.appo.appo import APPO

        return APPO

    def get_default_learner_class(self) -> Any:
        """APPOLearner."""
        from rlzmq.algorithms.appo.appo_learner import APPOLearner

        return APPOLearner

    def get_default_rl_module_spec(self) -> Any:
        """DefaultAPPOModule: an actor-critic with a target network of its policy."""
        from rlzmq.algorithms.appo.appo_module import DefaultAPPOModule
        from rlzmq.modules.spec import RLModuleSpec

        return RLModuleSpec(module_class=DefaultAPPOModule)

    @property
    def _default_model_config(self) -> dict[str, Any]:
        return {"vf_share_layers": False}
