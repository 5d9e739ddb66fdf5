"""Configs made of a config: the evaluation runners' and each module's, with what is set otherwise there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["ConfigOverrides"]

# The modules are the run's, also where an evaluation config of its own says nothing of them or other things.
_MODULES = ("policies", "rl_module_spec", "model_config", "algorithm_config_overrides_per_module")


class ConfigOverrides:
    """The part of AlgorithmConfig that applies evaluation_config and algorithm_config_overrides_per_module."""

    _values: dict[str, Any]
    _frozen: bool

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def overrides(cls, **kwargs: Any) -> dict[str, Any]:
        """A checked dict of overrides, for evaluation_config and per-module overrides.

        Raises:
            KeyError: A name is no setting of this class.
        """
        config = cls()
        for name in kwargs:
            if name not in config._values:
                raise KeyError(f"{cls.__name__} has no setting {name!r}.{did_you_mean(name, config._values)}")
        return kwargs

    def get_config_for_module(self, module_id: str) -> Self:
        """This config with the module's overrides applied (itself where there are none)."""
        overrides = self.algorithm_config_overrides_per_module.get(module_id)
        if not overrides:
            return self
        cached: dict[str, Self] = self.__dict__.setdefault("_per_module", {})
        if module_id not in cached or not self._frozen:
            new = self.copy(copy_frozen=False)
            new._values["algorithm_config_overrides_per_module"] = {}
            where = f"algorithm_config_overrides_per_module[{module_id!r}]"
            cached[module_id] = _with(new, overrides, where)
        return cached[module_id]

    def get_evaluation_config_object(self) -> Self:
        """The config of the evaluation runners: this one with `evaluation_config`'s settings, or the config that
        `evaluation_config` is.

        Their number is `evaluation_num_env_runners` in any case; a config's own modules are the run's.

        Raises:
            ConfigurationError: `evaluation_config` is neither, or a setting in it is unknown or wrong.
        """
        given = self.evaluation_config
        if isinstance(given, ConfigOverrides):
            new: Any = given.copy(copy_frozen=False)
            new._values.update({name: self._values[name] for name in _MODULES})
            for name in ("policy_mapping_fn", "seed"):
                if new._values[name] is None:
                    new._values[name] = self._values[name]
        else:
            new = self.copy(copy_frozen=False)
            new._values.update(evaluation_config=None, rollout_fragment_length="auto")
            new = _with(new, given or {}, "evaluation_config")
        new._values.update(
            num_env_runners=self.evaluation_num_env_runners, evaluation_config=None, in_evaluation=True
        )
        return new  # type: ignore[no-any-return]

    def _validate_overrides(self) -> None:
        self.get_evaluation_config_object()
        valid = {*self.module_ids, *(getattr(self.rl_module_spec, "rl_module_specs", None) or {})}
        for module_id in self.algorithm_config_overrides_per_module:
            if module_id not in valid:
                raise ConfigurationError(
                    f"config.algorithm_config_overrides_per_module names {module_id!r}, which is no module id."
                    f"{did_you_mean(module_id, valid)} (Of a module that is added later they are given to "
                    "add_module(config_overrides=…).)"
                )
            self.get_config_for_module(module_id)


def _with(config: Any, overrides: Any, where: str) -> Any:
    """`config` with the overrides set; an error says where they stand."""
    if not isinstance(overrides, Mapping):
        raise ConfigurationError(
            f"config.{where}: expected a dict of settings, got {overrides!r} ({type(overrides).__name__})."
        )
    try:
        return config.update_from_dict(overrides)
    except ConfigurationError as error:
        raise ConfigurationError(f"config.{where}: {error}") from None
