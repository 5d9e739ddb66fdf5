"""Plans for adding and removing modules of a run: the changed configs, and the change of the learners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.signatures import check_takes
from rlzmq.core.synonyms import did_you_mean
from rlzmq.driver.process_config import PLACES, ModuleConfigs
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

__all__ = [
    "SAME_RULES",
    "ModuleChange",
    "NewRules",
    "plan_addition",
    "plan_removal",
    "plan_training",
    "training",
    "with_module",
    "without_module",
]


@dataclass(frozen=True)
class ModuleChange:
    """A planned change of modules that is not applied yet.

    Attributes:
        configs: The configs after the change.
        change: ``change(learner)`` applies the change to a learner.
    """

    configs: ModuleConfigs
    change: Callable[[Any], Any]


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


def plan_addition(
    before: ModuleConfigs,
    spaces: tuple[Any, Any],
    module_id: str,
    module_spec: RLModuleSpec | None,
    *,
    places: Collection[str],
    config_overrides: Mapping[str, Any] | None = None,
    rules: NewRules = SAME_RULES,
) -> ModuleChange:
    """Plan to add a module.

    Args:
        before: The current configs.
        spaces: (observation space, action space) of one env.
        places: Where to add it.
        module_id, module_spec, config_overrides: See `Algorithm.add_module`.
        rules: New rules.

    Raises:
        ValueError, ConfigurationError: See `Algorithm.add_module`.
    """
    if not places:
        raise ValueError(f"add_module({module_id!r}): no place to add it to.")

    def added(config: BaseConfig, spec: RLModuleSpec | None) -> BaseConfig:
        return with_module(config, module_id, spec, config_overrides=config_overrides, rules=rules)

    run = added(before.run, module_spec)
    filled = run.get_multi_rl_module_spec(spaces={"__env_single__": spaces})[module_id]
    module = filled.build(seed=run.seed, module_id=module_id)  # raises here if it cannot be built
    if "learners" in places:
        run.learner_class.check_module(module_id, module, run)
    by_place = {}
    for place in PLACES:
        config = getattr(before, place)
        by_place[place] = added(config, filled.copy()) if place in places else rules.applied_to(config)
    configs = ModuleConfigs(run=added(before.run, filled.copy()), **by_place)
    _check_mapping(configs, spaces[0])

    def change(learner: Any) -> None:
        if "learners" in places:
            learner.add_module(
                module_id=module_id,
                module_spec=filled,
                config_overrides=config_overrides,
                new_should_module_be_updated=rules.to_train,
            )

    return ModuleChange(configs, change)


def plan_removal(
    before: ModuleConfigs,
    spaces: tuple[Any, Any],
    module_id: str,
    *,
    places: Collection[str],
    rules: NewRules = SAME_RULES,
) -> ModuleChange:
    """Plan to remove a module. For the arguments, see `plan_addition`.

    Raises:
        KeyError, ConfigurationError: See `Algorithm.remove_module`.
    """
    if module_id not in before.run.module_ids:
        without_module(before.run, module_id)  # raises KeyError
    by_place = {}
    for place in PLACES:
        config = getattr(before, place)
        is_there = place in places and module_id in config.module_ids
        by_place[place] = (
            without_module(config, module_id, rules=rules) if is_there else rules.applied_to(config)
        )
    is_left = any(module_id in config.module_ids for config in by_place.values())
    run = rules.applied_to(before.run) if is_left else without_module(before.run, module_id, rules=rules)
    configs = ModuleConfigs(run=run, **by_place)
    _check_mapping(configs, spaces[0])

    def change(learner: Any) -> None:
        if "learners" in places and module_id in learner.module:
            learner.remove_module(module_id, new_should_module_be_updated=rules.to_train)

    return ModuleChange(configs, change)


def plan_training(before: ModuleConfigs, module_ids: Sequence[str] | None) -> ModuleChange | None:
    """Plan to train only these modules (None: all); return None if nothing changes."""
    places = {place: training(getattr(before, place), module_ids) for place in ("run", *PLACES)}
    if all(config is getattr(before, place) for place, config in places.items()):
        return None

    def change(learner: Any) -> None:
        learner.policies_to_train = module_ids

    return ModuleChange(ModuleConfigs(**places), change)


def training(config: BaseConfig, module_ids: Sequence[str] | None) -> BaseConfig:
    """Return `config`, or a copy that trains only these of its modules; None: all."""
    trained = module_ids and [module_id for module_id in module_ids if module_id in config.module_ids]
    now = config.policies_to_train
    if trained == now or (trained and isinstance(now, Collection) and set(trained) == set(now)):
        return config
    return _edited(config, {"policies_to_train": trained}, check=False)


def _check_mapping(configs: ModuleConfigs, observation_spaces: object) -> None:
    """Raise ConfigurationError if an agent is mapped to a module that its runners lack."""
    for place in ("env_runners", "eval_env_runners"):
        config = getattr(configs, place)
        for agent_id in getattr(observation_spaces, "spaces", ()):
            try:
                module_id = config.policy_mapping_fn(agent_id, None)
            except Exception:  # the function reads the episode
                return
            if module_id not in config.module_ids:
                raise ConfigurationError(
                    f"policy_mapping_fn({agent_id!r}, episode) returns {module_id!r}, which the {place} would "
                    f"not have; they would have {config.module_ids}. Pass new_agent_to_module_mapping_fn=…"
                )
