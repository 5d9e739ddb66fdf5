"""Configs of other processes: only those callbacks that are called there, and the modules of each place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlzmq.config.base_config import BaseConfig
from rlzmq.core import by_value
from rlzmq.core.callbacks import RUNNER_HOOKS, hooks_of
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.signatures import check_takes
from rlzmq.core.synonyms import did_you_mean
from rlzmq.envs.registry import registration_of
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.saving import read_module_states
from rlzmq.modules.spec import RLModuleSpec

__all__ = [
    "PLACES",
    "SAME_RULES",
    "ModuleConfigs",
    "ModulePlace",
    "NewRules",
    "config_for_learners",
    "config_for_runners",
    "training",
    "weights_to_load",
    "with_module",
    "without_module",
]


def config_for_runners(config: BaseConfig) -> BaseConfig:
    """Return a config for env runners, without the driver's callbacks and the files and locks they may hold.

    Raises:
        ConfigurationError: A callback with hooks for runners cannot be sent to their processes.
    """
    sent = _with_hooks(config, RUNNER_HOOKS)
    for item in _listed(sent.callbacks_class):
        _check_can_be_sent(
            item, f"{getattr(item, '__name__', type(item).__name__)} ({_names(hooks_of(item))})"
        )
    for name, functions in sent.callbacks_hooks.items():
        for function in functions:
            _check_can_be_sent(function, f"{name}={function!r}")
    return _sendable(sent)


def config_for_learners(config: BaseConfig) -> BaseConfig:
    """Return a config for learners, without callbacks."""
    return _sendable(_with_hooks(config, ()))


def _sendable(config: BaseConfig) -> BaseConfig:
    """Return the config; raise a ConfigurationError that names the setting which other processes cannot get."""
    try:
        by_value.dumps(config, "it")
    except TypeError as error:
        for name, value in {**config.to_dict(), "env": (config.env, registration_of(config.env))}.items():
            try:
                by_value.dumps(value, "it")
            except TypeError as reason:
                raise ConfigurationError(
                    f"config.{config._fields[name].group}({name}=…) cannot be sent to the run's other processes: "
                    f"{reason.__cause__ or reason}. Create locks, files, sockets and envs inside the function or "
                    "class that you set, or import them there."
                ) from None
        raise error
    return config


def _with_hooks(config: BaseConfig, names: Collection[str]) -> BaseConfig:
    classes = _listed(config.callbacks_class)
    kept = [item for item in classes if set(names) & set(hooks_of(item))]
    hooks = {name: functions for name, functions in config.callbacks_hooks.items() if name in names}
    if len(kept) == len(classes) and len(hooks) == len(config.callbacks_hooks):
        return config
    new = config.copy(copy_frozen=False)
    new.callbacks_class = kept or None
    new.callbacks_hooks = hooks
    if config.is_frozen:
        new.freeze()
    return new


def _listed(classes: object) -> list[Any]:
    if classes is None:
        return []
    return list(classes) if isinstance(classes, list | tuple) else [classes]


def _check_can_be_sent(item: object, what: str) -> None:
    try:
        by_value.dumps(item, "it")
    except TypeError as error:
        raise ConfigurationError(
            f"callbacks: {what} runs in the env runners' processes, but cannot be sent there: "
            f"{error.__cause__ or error}. Create what cannot be sent (files, writers, locks) in a hook, on first "
            "use; or put the hooks that run in this process (on_train_result, …) into a separate class."
        ) from None


def _names(hooks: list[str]) -> str:
    return ", ".join(name for name in hooks if name in RUNNER_HOOKS)


ModulePlace = Literal["learners", "env_runners", "eval_env_runners"]
PLACES: tuple[ModulePlace, ...] = ("learners", "env_runners", "eval_env_runners")


@dataclass(frozen=True)
class ModuleConfigs:
    """One config per place. They differ only in their modules.

    Attributes:
        run: Config with all modules.
        learners, env_runners, eval_env_runners: Configs with the modules of these places.
    """

    run: BaseConfig
    learners: BaseConfig
    env_runners: BaseConfig
    eval_env_runners: BaseConfig

    @classmethod
    def everywhere(cls, config: BaseConfig) -> ModuleConfigs:
        """Create with all modules at all places."""
        return cls(config, config, config, config)

    def synced_module_ids(self, place: Literal["env_runners", "eval_env_runners"]) -> list[str] | None:
        """Return the modules whose weights are sent from the learners to a place; None: all."""
        there = getattr(self, place).module_ids
        if set(there) == set(self.learners.module_ids):
            return None
        return sorted(set(there) & set(self.learners.module_ids))


@dataclass(frozen=True)
class NewRules:
    """Rules that change together with the modules; None: unchanged.

    Attributes:
        mapping_fn: ``fn(agent_id, episode) -> module id``.
        to_train: `policies_to_train`.
    """

    mapping_fn: Callable[..., Any] | None = None
    to_train: Any = None

    def __post_init__(self) -> None:
        if self.mapping_fn is not None:
            check_takes(self.mapping_fn, "new_agent_to_module_mapping_fn", "agent_id", "episode")
        if callable(self.to_train):
            check_takes(self.to_train, "new_should_module_be_updated", "module_id", "batch")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a config that change."""
        rules = {"policy_mapping_fn": self.mapping_fn, "policies_to_train": self.to_train}
        return {name: rule for name, rule in rules.items() if rule is not None}

    def applied_to(self, config: BaseConfig) -> BaseConfig:
        """Return `config`, or a copy with those rules that concern its modules."""
        settings = self.settings
        if not settings:
            return config
        trained = settings.get("policies_to_train", config.policies_to_train)
        if trained is not None and not callable(trained):
            settings["policies_to_train"] = [mid for mid in trained if mid in config.module_ids]
        return _edited(config, settings, check=False)


SAME_RULES = NewRules()


def _edited(config: BaseConfig, settings: Mapping[str, Any], *, check: bool = True) -> BaseConfig:
    """Return a copy of `config` with changed settings; frozen if `config` is."""
    new = config.copy(copy_frozen=False)
    for name, value in settings.items():
        setattr(new, name, value)
    if check:
        new.validate()
    if config.is_frozen:
        new.freeze()
    return new


def with_module(
    config: BaseConfig,
    module_id: str,
    module_spec: RLModuleSpec | None = None,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    rules: NewRules = SAME_RULES,
) -> BaseConfig:
    """Return a copy of `config` with one more module; frozen if `config` is.

    For the arguments see `Algorithm.add_module`.

    Raises:
        ValueError: There is already a module with this id.
        ConfigurationError: The config is single-agent, or an override is not a setting.
    """
    if not config.is_multi_agent:
        raise ConfigurationError(
            "add_module: this run is single-agent (its one module is 'default_policy'). Modules can be added "
            "to runs with .multi_agent(policies={…}, policy_mapping_fn=…)."
        )
    if module_id in config.module_ids:
        raise ValueError(
            f"add_module: there is a module {module_id!r} already. Remove it, or use another id."
        )
    if not isinstance(module_spec, RLModuleSpec | None):
        raise TypeError(f"add_module: expected an RLModuleSpec or None, got {type(module_spec).__name__}.")
    given = config.policies
    policies = dict(given) if isinstance(given, Mapping) else dict.fromkeys(config.module_ids)
    settings: dict[str, Any] = {"policies": {**policies, module_id: module_spec}, **rules.settings}
    if config_overrides:
        type(config).overrides(**config_overrides)  # unknown names are errors
        per_module = dict(config.algorithm_config_overrides_per_module)
        settings["algorithm_config_overrides_per_module"] = {**per_module, module_id: dict(config_overrides)}
    return _edited(config, settings)


def without_module(config: BaseConfig, module_id: str, *, rules: NewRules = SAME_RULES) -> BaseConfig:
    """Return a copy of `config` without one module; frozen if `config` is.

    Raises:
        KeyError: There is no module with this id.
        ConfigurationError: It is the last one, or only "default_policy" would remain.
    """
    ids = [other for other in config.module_ids if other != module_id]
    if len(ids) == len(config.module_ids):
        raise KeyError(f"no module {module_id!r}.{did_you_mean(module_id, ids)}")
    if not ids or ids == ["default_policy"]:
        left = "no module" if not ids else "only 'default_policy', which is a single-agent run,"
        raise ConfigurationError(f"remove_module({module_id!r}): {left} would be left.")
    given = config.policies if isinstance(config.policies, Mapping) else {}
    per_module = dict(config.algorithm_config_overrides_per_module)
    per_module.pop(module_id, None)
    settings: dict[str, Any] = {
        "policies": {other: given.get(other) for other in ids},
        "algorithm_config_overrides_per_module": per_module,
    }
    outer = config.rl_module_spec
    if isinstance(outer, MultiRLModuleSpec) and module_id in outer.rl_module_specs:
        settings["rl_module_spec"] = kept = outer.copy()
        kept.remove_modules(module_id)
    trained = config.policies_to_train
    if trained is not None and not callable(trained):
        settings["policies_to_train"] = [other for other in trained if other != module_id]
    return _edited(config, settings | rules.settings)


def training(config: BaseConfig, module_ids: Sequence[str] | None) -> BaseConfig:
    """Return `config`, or a copy that trains only these of its modules; None: all."""
    trained = module_ids and [module_id for module_id in module_ids if module_id in config.module_ids]
    now = config.policies_to_train
    if trained == now or (trained and isinstance(now, Collection) and set(trained) == set(now)):
        return config
    return _edited(config, {"policies_to_train": trained}, check=False)


def weights_to_load(
    module_spec: Any,
    *,
    multi_rl_module_ckpt_dir: str | Path | None,
    modules_to_load: Collection[str] | None,
    rl_module_ckpt_dirs: Mapping[str, str | Path] | None,
) -> dict[str, Any]:
    """Return module id → weights. For arguments and errors, see `AsyncLearnerGroup.load_module_state`."""
    mine = module_spec.as_multi_rl_module_spec()
    weights: dict[str, Any] = {}
    if multi_rl_module_ckpt_dir is not None:
        found = read_module_states(multi_rl_module_ckpt_dir)
        for module_id in (
            [mid for mid in found if mid in mine] if modules_to_load is None else modules_to_load
        ):
            if module_id not in found:
                names = did_you_mean(module_id, found)
                raise CheckpointError(f"{multi_rl_module_ckpt_dir} has no module {module_id!r}.{names}")
            weights[module_id] = found[module_id]
    for module_id, path in (rl_module_ckpt_dirs or {}).items():
        weights |= read_module_states(path, module_id)
    for module_id in weights:
        mine[module_id]  # raises KeyError if the learners have no such module
    return weights
