"""TrainedModules: which modules a learner trains, and with which settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import nn

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.update_plan import Schedule
from rlzmq.learners.sources import BatchSource
from rlzmq.learners.train_batch import TrainBatch
from rlzmq.modules.rl_module import SelfSupervisedLossAPI
from rlzmq.modules.weights import parameters_of

__all__ = ["TrainedModules", "check_interfaces", "is_trainable"]


class _Learner(Protocol):
    """What decides on a learner's modules."""

    config: BaseConfig
    module: Any
    source: BatchSource
    scheduled_settings: ClassVar[Sequence[str]]

    def should_module_be_updated(self, module_id: str, multi_agent_batch: Any = None) -> bool: ...


class TrainedModules:
    """The modules of a learner: each one's settings and their current values, and whether it is trained.

    A module is trained if it has trainable parameters and the learner's `should_module_be_updated` says so.

    Args:
        learner: The learner.

    Attributes:
        configs: Module id → the config with the module's own overrides.
        to_train: ``config.policies_to_train``: None (all), ids, or ``fn(module_id, batch) -> bool``.
        coefficients: Setting → module id → current value, see `Learner`.
    """

    def __init__(self, learner: _Learner) -> None:
        self._learner = learner
        self._schedules: dict[tuple[str, str], Schedule] = {}
        self.configs: dict[str, BaseConfig] = {}
        self.coefficients: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.to_train: Sequence[str] | Callable[[str, Any], bool] | None = getattr(
            learner.config, "policies_to_train", None
        )

    def add(self, module_id: str) -> None:
        """Note a module's settings; those that are schedules start with their first values."""
        run = self._learner.config
        get_config = getattr(run, "get_config_for_module", None)
        config = self.configs[module_id] = run if get_config is None else get_config(module_id)
        for setting in self._learner.scheduled_settings:
            schedule = self._schedules[setting, module_id] = Schedule(getattr(config, setting), setting)
            self.coefficients[setting][module_id] = schedule.values[0]

    def remove(self, module_id: str) -> None:
        """Forget a module."""
        self.configs.pop(module_id, None)
        for setting, coefficients in self.coefficients.items():
            coefficients.pop(module_id, None)
            self._schedules.pop((setting, module_id), None)

    def follow_schedules(self, num_env_steps: int) -> Iterator[tuple[str, str, float]]:
        """Set scheduled settings to their values after `num_env_steps`; yield setting, module id, value until then."""
        for (setting, module_id), schedule in self._schedules.items():
            coefficients = self.coefficients[setting]
            yield setting, module_id, coefficients[module_id]
            coefficients[module_id] = schedule.value(num_env_steps)

    def includes(self, module_id: str, batch: Mapping[str, Any] | None) -> bool:
        """Return whether `to_train` includes a module, given a train batch."""
        if self.to_train is None:
            return True
        if callable(self.to_train):
            return bool(self.to_train(module_id, batch))
        return module_id in self.to_train

    def leave_out_others(self, train_batch: TrainBatch) -> None:
        """Drop the rows of the modules that are not trained."""
        learner = self._learner
        for module_id in list(train_batch.columns):
            trains = module_id in learner.module and is_trainable(learner.module[module_id].unwrapped())
            if not (trains and learner.should_module_be_updated(module_id, train_batch.columns)):
                train_batch.drop(module_id)

    def divide_source(self) -> None:
        """Pass the set of modules to a source that stores steps by module.

        If `to_train` is a function, it may choose any of them, depending on the data.
        """
        learner = self._learner
        if not learner.source.divides_by_module:
            return
        module_ids = [mid for mid, module in learner.module.items() if is_trainable(module.unwrapped())]
        is_open = callable(self.to_train)
        trained = [mid for mid in module_ids if is_open or learner.should_module_be_updated(mid)]
        learner.source.set_modules(module_ids, trained)


def is_trainable(module: object) -> bool:
    """Return whether a module has trainable parameters."""
    return isinstance(module, nn.Module) and any(p.requires_grad for p in parameters_of(module))


def check_interfaces(module_id: str, module: Any, required: Sequence[type], learner: str) -> None:
    """Check that a module implements what the losses of a learner's class call.

    Raises:
        TypeError: It lacks one of the interfaces.
    """
    if isinstance(module, SelfSupervisedLossAPI) or not is_trainable(module):
        return
    missing = [api.__name__ for api in required if not isinstance(module, api)]
    if missing:
        raise TypeError(
            f"{learner} needs module {module_id!r} ({type(module).__name__}) to be a "
            f"{' and a '.join(missing)}: add the mix-in to its base classes, "
            f"class {type(module).__name__}(TorchRLModule, {', '.join(missing)})."
        )
