"""Plans for adding and removing modules of a run: changed configs, and the change of the learners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.driver.module_configs import ModuleConfigs
from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

__all__ = [
    "ModuleChange",
    "plan_addition",
    "plan_removal",
    "plan_training",
    "training",
    "with_module",
    "without_module",
]

MappingFn = Callable[..., Any]
_PLACES = ("learners", "env_runners", "eval_env_runners")


@dataclass(frozen=True)
class ModuleChange:
    """A planned change of modules, not applied yet.

    Attributes:
        configs: The configs after the change.
        change: ``change(learner)`` applies it to a learner.
    """

    configs: ModuleConfigs
    change: Callable[[Any], Any]


def with_module(
    config: BaseConfig,
    module_id: str,
    module_spec: RLModuleSpec | None = None,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    new_agent_to_module_mapping_fn: MappingFn | None = None,
    new_should_module_be_updated: Any = None,
) -> BaseConfig:
    """Return a copy of `config` with one more module; frozen if `config` is.

    For the arguments see `Algorithm.add_module`.

    Raises:
        ValueError: There is a module of this id.
        ConfigurationError: The config is a single-agent one, or an override is no setting.
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
    new = config.copy(copy_frozen=False)
    policies = (
        dict(config.policies) if isinstance(config.policies, Mapping) else dict.fromkeys(config.module_ids)
    )
    new.policies = {**policies, module_id: module_spec}
    if config_overrides:
        type(config).overrides(**config_overrides)  # unknown names are errors
        per_module = dict(config.algorithm_config_overrides_per_module)
        new.algorithm_config_overrides_per_module = {**per_module, module_id: dict(config_overrides)}
    return _finished(config, new, new_agent_to_module_mapping_fn, new_should_module_be_updated)


def without_module(
    config: BaseConfig,
    module_id: str,
    *,
    new_agent_to_module_mapping_fn: MappingFn | None = None,
    new_should_module_be_updated: Any = None,
) -> BaseConfig:
    """Return a copy of `config` without one module; frozen if `config` is.

    Raises:
        KeyError: There is no module with this id.
        ConfigurationError: It is the last one, or only "default_policy" would be left.
    """
    ids = [other for other in config.module_ids if other != module_id]
    if len(ids) == len(config.module_ids):
        raise KeyError(f"no module {module_id!r}.{did_you_mean(module_id, ids)}")
    if not ids or ids == ["default_policy"]:
        left = "no module" if not ids else "only 'default_policy', which is a single-agent run,"
        raise ConfigurationError(f"remove_module({module_id!r}): {left} would be left.")
    new = config.copy(copy_frozen=False)
    given = config.policies if isinstance(config.policies, Mapping) else {}
    new.policies = {other: given.get(other) for other in ids}
    outer = config.rl_module_spec
    if isinstance(outer, MultiRLModuleSpec) and module_id in outer.rl_module_specs:
        kept = {other: spec for other, spec in outer.rl_module_specs.items() if other != module_id}
        new.rl_module_spec = MultiRLModuleSpec(
            kept,
            multi_rl_module_class=outer.multi_rl_module_class,
            observation_space=outer.observation_space,
            action_space=outer.action_space,
            inference_only=outer.inference_only,
            model_config=outer.model_config,
            load_state_path=outer.load_state_path,
            modules_to_load=outer.modules_to_load,
        )
    per_module = dict(config.algorithm_config_overrides_per_module)
    per_module.pop(module_id, None)
    new.algorithm_config_overrides_per_module = per_module
    trained = config.policies_to_train
    if trained is not None and not callable(trained) and new_should_module_be_updated is None:
        new.policies_to_train = [other for other in trained if other != module_id]
    return _finished(config, new, new_agent_to_module_mapping_fn, new_should_module_be_updated)


def _finished(config: BaseConfig, new: BaseConfig, mapping_fn: MappingFn | None, to_train: Any) -> BaseConfig:
    if mapping_fn is not None:
        new.policy_mapping_fn = mapping_fn
    if to_train is not None:
        new.policies_to_train = to_train
    new.validate()
    if config.is_frozen:
        new.freeze()
    return new


def plan_addition(
    before: ModuleConfigs,
    spaces: tuple[Any, Any],
    module_id: str,
    module_spec: RLModuleSpec | None,
    *,
    places: Collection[str],
    config_overrides: Mapping[str, Any] | None = None,
    new_agent_to_module_mapping_fn: MappingFn | None = None,
    new_should_module_be_updated: Any = None,
) -> ModuleChange:
    """Plan to add a module.

    Args:
        before: The current configs.
        spaces: (observation space, action space) of one env.
        places: Where to add it.
        module_id, module_spec, config_overrides, new_agent_to_module_mapping_fn, new_should_module_be_updated:
            See `Algorithm.add_module`.

    Raises:
        ValueError, ConfigurationError: See `Algorithm.add_module`.
    """
    if not places:
        raise ValueError(f"add_module({module_id!r}): no place to add it to.")
    options = {
        "config_overrides": config_overrides,
        "new_agent_to_module_mapping_fn": new_agent_to_module_mapping_fn,
        "new_should_module_be_updated": new_should_module_be_updated,
    }
    run = with_module(before.run, module_id, module_spec, **options)
    filled = run.get_multi_rl_module_spec(spaces={"__env_single__": spaces})[module_id]
    filled.build(seed=run.seed, module_id=module_id)  # raises here if it cannot be built
    run = with_module(before.run, module_id, filled.copy(), **options)
    by_place = {}
    for place in _PLACES:
        config = getattr(before, place)
        if place in places:
            by_place[place] = with_module(config, module_id, filled.copy(), **options)
        else:
            by_place[place] = _with_new_rules(
                config, new_agent_to_module_mapping_fn, new_should_module_be_updated
            )
    configs = ModuleConfigs(run=run, **by_place)
    _check_mapping(configs, spaces[0])

    def change(learner: Any) -> None:
        if "learners" in places:
            learner.add_module(
                module_id=module_id,
                module_spec=filled,
                config_overrides=config_overrides,
                new_should_module_be_updated=new_should_module_be_updated,
            )

    return ModuleChange(configs, change)


def plan_removal(
    before: ModuleConfigs,
    spaces: tuple[Any, Any],
    module_id: str,
    *,
    places: Collection[str],
    new_agent_to_module_mapping_fn: MappingFn | None = None,
    new_should_module_be_updated: Any = None,
) -> ModuleChange:
    """Plan to remove a module; for the arguments see `plan_addition`.

    Raises:
        KeyError, ConfigurationError: See `Algorithm.remove_module`.
    """
    rules = new_agent_to_module_mapping_fn, new_should_module_be_updated
    options = {
        "new_agent_to_module_mapping_fn": new_agent_to_module_mapping_fn,
        "new_should_module_be_updated": new_should_module_be_updated,
    }
    if module_id not in before.run.module_ids:
        without_module(before.run, module_id)  # raises KeyError
    by_place = {}
    for place in _PLACES:
        config = getattr(before, place)
        if place in places and module_id in config.module_ids:
            by_place[place] = without_module(config, module_id, **options)
        else:
            by_place[place] = _with_new_rules(config, *rules)
    if any(module_id in config.module_ids for config in by_place.values()):
        run = _with_new_rules(before.run, *rules)
    else:
        run = without_module(before.run, module_id, **options)
    configs = ModuleConfigs(run=run, **by_place)
    _check_mapping(configs, spaces[0])

    def change(learner: Any) -> None:
        if "learners" in places and module_id in learner.module:
            learner.remove_module(module_id, new_should_module_be_updated=new_should_module_be_updated)

    return ModuleChange(configs, change)


def plan_training(before: ModuleConfigs, module_ids: Sequence[str] | None) -> ModuleChange | None:
    """Plan to train only these modules (None: all); return None if that is already so."""
    places = {place: training(getattr(before, place), module_ids) for place in ("run", *_PLACES)}
    if all(config is getattr(before, place) for place, config in places.items()):
        return None

    def change(learner: Any) -> None:
        learner._policies_to_train = module_ids

    return ModuleChange(ModuleConfigs(**places), change)


def training(config: BaseConfig, module_ids: Sequence[str] | None) -> BaseConfig:
    """Return `config`, or a copy, that trains only these of its modules; None: all."""
    trained = module_ids and [module_id for module_id in module_ids if module_id in config.module_ids]
    now = config.policies_to_train
    if trained == now or (trained and isinstance(now, Collection) and set(trained) == set(now)):
        return config
    new = config.copy(copy_frozen=False)
    new.policies_to_train = trained
    if config.is_frozen:
        new.freeze()
    return new


def _with_new_rules(config: BaseConfig, mapping_fn: MappingFn | None, to_train: Any) -> BaseConfig:
    if mapping_fn is None and to_train is None:
        return config
    new = config.copy(copy_frozen=False)
    if mapping_fn is not None:
        new.policy_mapping_fn = mapping_fn
    trained = config.policies_to_train if to_train is None else to_train
    if trained is not None and not callable(trained):
        new.policies_to_train = [module_id for module_id in trained if module_id in config.module_ids]
    elif to_train is not None:
        new.policies_to_train = to_train
    if config.is_frozen:
        new.freeze()
    return new


def _check_mapping(configs: ModuleConfigs, observation_spaces: Any) -> None:
    """Raise ConfigurationError if an agent is mapped to a module that its runners do not have."""
    for place in ("env_runners", "eval_env_runners"):
        config = getattr(configs, place)
        for agent_id in getattr(observation_spaces, "spaces", ()):
            try:
                module_id = config.policy_mapping_fn(agent_id, None)
            except Exception:  # it reads the episode
                return
            if module_id not in config.module_ids:
                raise ConfigurationError(
                    f"policy_mapping_fn({agent_id!r}, episode) returns {module_id!r}, which the {place} would "
                    f"not have; they would have {config.module_ids}. Give new_agent_to_module_mapping_fn=…"
                )
