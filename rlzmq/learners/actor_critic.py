"""ActorCriticLearner: what learners of a policy with an entropy bonus and a value function share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from rlzmq.config.base_config import BaseConfig
from rlzmq.learners.learner import TorchLearner
from rlzmq.learners.schedule import Schedule
from rlzmq.modules.apis import ValueFunctionAPI

__all__ = ["ActorCriticLearner"]


class _ActorCriticSettings(Protocol):
    """What is read of an algorithm's config."""

    entropy_coeff: float | Sequence[Sequence[float]]


class ActorCriticLearner(TorchLearner):
    """Keeps each module's entropy coefficient on its schedule, ``config.entropy_coeff``; subclasses give the loss.

    Attributes:
        entropy_coeff_schedulers_per_module: Module id → its schedule; `current` is what the loss multiplies with.
    """

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """`ValueFunctionAPI`."""
        return [ValueFunctionAPI]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.entropy_coeff_schedulers_per_module: dict[str, Schedule] = {}

    def configure_optimizers_for_module(self, module_id: str, config: BaseConfig) -> None:
        super().configure_optimizers_for_module(module_id, config)
        coefficient = cast(_ActorCriticSettings, config).entropy_coeff
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
