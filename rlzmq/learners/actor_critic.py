"""Base classes of actor-critic learners: scheduled entropy bonus, adaptive KL penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from rlzmq.learners.learner import TorchLearner
from rlzmq.learners.schedule import Schedule
from rlzmq.modules.rl_module import ValueFunctionAPI

__all__ = ["ActorCriticLearner", "AdaptiveKLLearner", "adapted_kl_coeff"]


class _ActorCriticSettings(Protocol):
    """The config settings that ActorCriticLearner reads."""

    entropy_coeff: float | Sequence[Sequence[float]]


class _KLSettings(Protocol):
    """The config settings that AdaptiveKLLearner reads."""

    use_kl_loss: bool
    kl_coeff: float
    kl_target: float


class ActorCriticLearner(TorchLearner):
    """Base of learners with an entropy bonus, whose coefficient follows the schedule ``config.entropy_coeff``.

    Attributes:
        entropy_coeff_schedulers_per_module: Module id → its schedule; `current` is the loss's coefficient.
    """

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return `ValueFunctionAPI`."""
        return [ValueFunctionAPI]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.entropy_coeff_schedulers_per_module: dict[str, Schedule] = {}

    def _prepare_module(self, module_id: str) -> None:
        super()._prepare_module(module_id)
        coefficient = cast(_ActorCriticSettings, self.config_for_module(module_id)).entropy_coeff
        self.entropy_coeff_schedulers_per_module[module_id] = Schedule(coefficient, "entropy_coeff")

    def remove_module(self, module_id: str, **kwargs: Any) -> None:
        super().remove_module(module_id, **kwargs)
        self.entropy_coeff_schedulers_per_module.pop(module_id, None)

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        for module_id, schedule in self.entropy_coeff_schedulers_per_module.items():
            if module_id in self.trained_module_ids:
                self.log_stats(module_id, {"curr_entropy_coeff": schedule.current})
            schedule.update(self._clock(timesteps))

    def get_extra_state(self) -> dict[str, Any]:
        coefficients = {m: s.current for m, s in self.entropy_coeff_schedulers_per_module.items()}
        return {**super().get_extra_state(), "entropy_coeffs": coefficients}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        super().set_extra_state(state)
        for module_id, coefficient in state["entropy_coeffs"].items():
            if module_id in self.entropy_coeff_schedulers_per_module:
                self.entropy_coeff_schedulers_per_module[module_id].current = float(coefficient)


class AdaptiveKLLearner(ActorCriticLearner):
    """Base of learners with a KL penalty, whose coefficient adapts to the measured divergence.

    After every update each trained module's coefficient is multiplied by 1.5 if the mean of its logged
    ``mean_kl_loss`` over the last epoch and all ranks exceeds twice ``config.kl_target``, and by 0.5 if it is below
    half of it. Needs ``config.use_kl_loss``.

    Attributes:
        curr_kl_coeffs_per_module: Module id → its KL coefficient.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.curr_kl_coeffs_per_module: dict[str, float] = {}

    def _prepare_module(self, module_id: str) -> None:
        super()._prepare_module(module_id)
        settings = cast(_KLSettings, self.config_for_module(module_id))
        self.curr_kl_coeffs_per_module[module_id] = float(settings.kl_coeff)

    def remove_module(self, module_id: str, **kwargs: Any) -> None:
        super().remove_module(module_id, **kwargs)
        self.curr_kl_coeffs_per_module.pop(module_id, None)

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        coefficients = self.curr_kl_coeffs_per_module
        for module_id, measured in self.mean_stats_over_ranks("mean_kl_loss").items():
            settings = cast(_KLSettings, self.config_for_module(module_id))
            if settings.use_kl_loss:
                coefficients[module_id] = adapted_kl_coeff(
                    coefficients[module_id], measured, settings.kl_target
                )
                self.log_stats(module_id, {"curr_kl_coeff": coefficients[module_id]})

    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "kl_coeffs": dict(self.curr_kl_coeffs_per_module)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        super().set_extra_state(state)
        for module_id, coefficient in state["kl_coeffs"].items():
            if module_id in self.curr_kl_coeffs_per_module:
                self.curr_kl_coeffs_per_module[module_id] = float(coefficient)


def adapted_kl_coeff(coefficient: float, measured: float, target: float) -> float:
    """Return the next update's KL coefficient: ×1.5 above twice the target, ×0.5 below half of it.

    A NaN or infinite divergence leaves the coefficient unchanged.
    """
    if not math.isfinite(measured):
        return coefficient
    if measured > 2.0 * target:
        return coefficient * 1.5
    return coefficient * 0.5 if measured < 0.5 * target else coefficient
