"""DQN: deep Q-network (Mnih et al. 2013, arXiv:1312.5602) with the parts of Rainbow (arXiv:1710.02298)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from rlzmq.algorithms.off_policy import OffPolicyConfig, OffPolicySettings
from rlzmq.config.settings import Fraction, NonNegativeInt, Positive, PositiveInt, setting, settings, takes
from rlzmq.core.errors import ConfigurationError

__all__ = ["DQNConfig", "DQNTrainingSettings"]


@settings
class DQNTrainingSettings(OffPolicySettings):
    """DQN's settings, in addition to those of `OffPolicyConfig`.

    Args:
        epsilon: Probability of a random action while exploring, or a schedule over the run's lifetime env steps.
        double_q: Whether the trained network chooses the next action and the target network only evaluates it
            (arXiv:1509.06461).
        dueling: Whether the network has separate streams for state values and advantages (arXiv:1511.06581).
        noisy: Whether the heads' weights have learned noise, which replaces other exploration (arXiv:1706.10295); set
            `epsilon` to 0 then.
        sigma0: Initial scale of that noise.
        num_atoms: Number of atoms of the return's distribution (arXiv:1707.06887); 1: the network predicts its mean.
        v_min, v_max: Smallest and largest atom.
        td_error_loss_fn: "huber" (with δ = 1) or "mse"; with several atoms the loss is a cross-entropy instead.
        burn_in_len: For stateful modules, the number of a sequence's ``max_seq_len`` steps before the trained ones,
            which only warm up the state (R2D2, https://openreview.net/forum?id=r1lyTjAqYX).
    """

    epsilon: Fraction | list[tuple[float, Fraction]] = setting(default=[(0, 1.0), (10_000, 0.05)])
    double_q: bool = True
    dueling: bool = True
    noisy: bool = False
    sigma0: Positive = 0.5
    num_atoms: PositiveInt = 1
    v_min: float = -10.0
    v_max: float = 10.0
    td_error_loss_fn: Literal["huber", "mse"] = "huber"
    burn_in_len: NonNegativeInt = 0


class DQNConfig(OffPolicyConfig, DQNTrainingSettings):
    """Settings of DQN, with RLlib's defaults."""

    _defaults: ClassVar[dict[str, Any]] = {
        "lr": 5e-4,
        "grad_clip": 40.0,
        "evaluation_config": {"explore": False},
    }
    _algorithm: ClassVar[str] = "DQN"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.dqn.dqn_learner:DQNLearner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.dqn.dqn_module:DefaultDQNModule"
    _model_setting_names = ("dueling", "epsilon", "noisy", "sigma0", "num_atoms", "v_min", "v_max")

    @takes(DQNTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `DQNTrainingSettings`."""
        return self

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        if self.num_atoms > 1 and not self.v_min < self.v_max:
            raise ConfigurationError(
                f"config.v_min={self.v_min:g}, config.v_max={self.v_max:g}: expected v_min < v_max."
            )
