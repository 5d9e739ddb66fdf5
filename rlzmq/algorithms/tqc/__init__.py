"""TQC: truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269)."""

from __future__ import annotations

from typing import ClassVar, Self

from rlzmq.algorithms.sac import SACConfig, SACTrainingSettings
from rlzmq.config.settings import NonNegativeInt, PositiveInt, settings, takes
from rlzmq.core.errors import ConfigurationError

__all__ = ["TQCConfig", "TQCTrainingSettings"]


@settings
class TQCTrainingSettings(SACTrainingSettings):
    """TQC's settings, in addition to those of `SACConfig.training`; `n_critics` replaces `twin_q`.

    Args:
        n_quantiles: Number of quantiles that each critic predicts.
        n_critics: Number of critics.
        top_quantiles_to_drop_per_net: For each critic, the number of largest quantiles left out of the targets.
    """

    n_quantiles: PositiveInt = 25
    n_critics: PositiveInt = 2
    top_quantiles_to_drop_per_net: NonNegativeInt = 2


class TQCConfig(SACConfig, TQCTrainingSettings):
    """Settings of TQC, with RLlib's defaults but for SAC's."""

    _algorithm: ClassVar[str] = "TQC"
    _learner_class: ClassVar[str] = "rlzmq.algorithms.tqc.tqc_learner:TQCLearner"
    _module_class: ClassVar[str] = "rlzmq.algorithms.tqc.tqc_learner:DefaultTQCModule"
    _model_setting_names: ClassVar[tuple[str, ...]] = ("n_critics", "n_quantiles", "initial_alpha")

    @takes(TQCTrainingSettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `TQCTrainingSettings`."""
        return self

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        if not self.twin_q:
            raise ConfigurationError("config.twin_q=False has no effect: TQC has n_critics. Set n_critics=1.")
        if self.top_quantiles_to_drop_per_net >= self.n_quantiles:
            raise ConfigurationError(
                f"config.top_quantiles_to_drop_per_net={self.top_quantiles_to_drop_per_net} leaves none of "
                f"n_quantiles={self.n_quantiles}. Set at most {self.n_quantiles - 1}."
            )
