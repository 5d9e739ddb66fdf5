"""Configs with a module more or less, and modules as checkpoints store them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.plain import NotPlainError
from rlzmq.core.space_plain import space_to_plain
from rlzmq.core.suggest import did_you_mean
from rlzmq.modules.class_names import class_name
from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
from rlzmq.modules.rl_module import RLModule
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runtime.module_configs import ModuleConfigs

__all__ = [
    "ModuleChanges",
    "modules_to_store",
    "stored_spec",
    "with_module",
    "with_stored_modules",
    "without_module",
]

_log = logging.getLogger("rlzmq.checkpoints")

MappingFn = Callable[..., Any]
_PLACES = ("learners", "env_runners", "eval_env_runners")


def with_module(
    config: Any,
    module_id: str,
    module_spec: RLModuleSpec | None = None,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    new_agent_to_module_mapping_fn: MappingFn | None = None,
    new_should_module_be_updated: Any = None,
) -> Any:
    """A copy of `config` that has one module more; frozen if `config` is.

    Arguments are as of `Algorithm.add_module`.

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
    config: Any,
    module_id: str,
    *,
    new_agent_to_module_mapping_fn: MappingFn | None = None,
    new_should_module_be_updated: Any = None,
) -> Any:
    """A copy of `config` that has one module less; frozen if `config` is.

    Raises:
        KeyError: There is none of this id.
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


def _finished(config: Any, new: Any, mapping_fn: MappingFn | None, to_train: Any) -> Any:
    if mapping_fn is not None:
        new.policy_mapping_fn = mapping_fn
    if to_train is not None:
        new.policies_to_train = to_train
    new.validate()
    if config.is_frozen:
        new.freeze()
    return new


class ModuleChanges:
    """Plans additions and removals for a running run.

    Args:
        config: The run's.

    Attributes:
        configs: As they are now, by place; replaced once a change is made.
        has_own_rule: Whether a change has said which modules are trained, so that the config that the run was
            built with does not.
    """

    def __init__(self, config: Any) -> None:
        self.configs = ModuleConfigs.everywhere(config)
        self.has_own_rule = False

    def added(
        self,
        spaces: tuple[Any, Any],
        module_id: str,
        module_spec: RLModuleSpec | None,
        *,
        places: Sequence[str],
        config_overrides: Mapping[str, Any] | None,
        new_agent_to_module_mapping_fn: MappingFn | None,
        new_should_module_be_updated: Any,
    ) -> tuple[ModuleConfigs, Callable[[Any], Any]]:
        """The configs with a module more, and what adds it to a learner; changes nothing yet.

        Args:
            spaces: (observation space, action space) of one env.
            places: Where it is to be.
            Others: As of `Algorithm.add_module`.

        Raises:
            ValueError, ConfigurationError: As of `Algorithm.add_module`.
        """
        if not places:
            raise ValueError(f"add_module({module_id!r}): it is to be added nowhere.")
        options = {
            "config_overrides": config_overrides,
            "new_agent_to_module_mapping_fn": new_agent_to_module_mapping_fn,
            "new_should_module_be_updated": new_should_module_be_updated,
        }
        run = with_module(self.configs.run, module_id, module_spec, **options)
        filled = run.get_multi_rl_module_spec(spaces={"__env_single__": spaces})[module_id]
        filled.build(seed=run.seed, module_id=module_id)  # what cannot be built is said here
        run = with_module(self.configs.run, module_id, filled.copy(), **options)
        by_place = {}
        for place in _PLACES:
            before = getattr(self.configs, place)
            if place in places:
                by_place[place] = with_module(before, module_id, filled.copy(), **options)
            else:
                by_place[place] = _with_new_rules(
                    before, new_agent_to_module_mapping_fn, new_should_module_be_updated
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

        return configs, change

    def removed(
        self,
        spaces: tuple[Any, Any],
        module_id: str,
        *,
        places: Sequence[str],
        new_agent_to_module_mapping_fn: MappingFn | None,
        new_should_module_be_updated: Any,
    ) -> tuple[ModuleConfigs, Callable[[Any], Any]]:
        """The configs with a module less, and what removes it from a learner; changes nothing yet.

        Arguments are as of `added`.

        Raises:
            KeyError, ConfigurationError: As of `Algorithm.remove_module`.
        """
        rules = new_agent_to_module_mapping_fn, new_should_module_be_updated
        options = {
            "new_agent_to_module_mapping_fn": new_agent_to_module_mapping_fn,
            "new_should_module_be_updated": new_should_module_be_updated,
        }
        if module_id not in self.configs.run.module_ids:
            without_module(self.configs.run, module_id)  # says so
        by_place = {}
        for place in _PLACES:
            before = getattr(self.configs, place)
            if place in places and module_id in before.module_ids:
                by_place[place] = without_module(before, module_id, **options)
            else:
                by_place[place] = _with_new_rules(before, *rules)
        if any(module_id in config.module_ids for config in by_place.values()):
            run = _with_new_rules(self.configs.run, *rules)
        else:
            run = without_module(self.configs.run, module_id, **options)
        configs = ModuleConfigs(run=run, **by_place)
        _check_mapping(configs, spaces[0])

        def change(learner: Any) -> None:
            if "learners" in places and module_id in learner.module:
                learner.remove_module(module_id, new_should_module_be_updated=new_should_module_be_updated)

        return configs, change

    def trained_as(self, stored: Mapping[str, Any]) -> tuple[ModuleConfigs, Callable[[Any], Any]] | None:
        """What makes the run train the modules that a checkpoint's run trained; None: nothing has to change.

        Where neither run changed `policies_to_train` by adding or removing modules, it stays the config's.

        Args:
            stored: What `modules_to_store` returned.
        """
        rule = stored.get("trained")
        if rule is None or not (rule["is_changed"] or self.has_own_rule):
            return None
        self.has_own_rule = rule["is_changed"]
        if rule["is_function"]:
            if not callable(self.configs.run.policies_to_train):
                _log.warning(
                    "The run that was saved asked a function of its own which modules to train; checkpoints do not "
                    "carry functions. Now these are trained: %s. Pass config=… with "
                    ".multi_agent(policies_to_train=…) to train others.",
                    self.configs.run.policies_to_train or "all",
                )
            return None
        ids = rule["module_ids"]
        places = {place: _training(getattr(self.configs, place), ids) for place in ("run", *_PLACES)}
        if all(config is getattr(self.configs, place) for place, config in places.items()):
            return None

        def change(learner: Any) -> None:
            learner._policies_to_train = ids

        return ModuleConfigs(**places), change


def _training(config: Any, module_ids: Sequence[str] | None) -> Any:
    """`config`, or a copy, that trains these of its modules; None: all."""
    trained = module_ids and [module_id for module_id in module_ids if module_id in config.module_ids]
    now = config.policies_to_train
    if trained == now or (trained and isinstance(now, Collection) and set(trained) == set(now)):
        return config
    new = config.copy(copy_frozen=False)
    new.policies_to_train = trained
    if config.is_frozen:
        new.freeze()
    return new


def _with_new_rules(config: Any, mapping_fn: MappingFn | None, to_train: Any) -> Any:
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
    """Raise ConfigurationError where an agent is mapped to a module that its runners do not have."""
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


# -- checkpoints ------------------------------------------------------------------------------------


def modules_to_store(config: Any, spaces: tuple[Any, Any], *, has_own_rule: bool = False) -> dict[str, Any]:
    """What a checkpoint says about the modules: specs, the env's spaces, which are trained; plain values.

    Args:
        config: With the modules as they are now.
        spaces: (observation space, action space) of one env.
        has_own_rule: Whether the run itself has changed which modules are trained (see `ModuleChanges`).
    """
    filled = config.get_multi_rl_module_spec(spaces={"__env_single__": spaces})
    specs = {module_id: _plain_or_none(spec.to_dict) for module_id, spec in filled.rl_module_specs.items()}
    trained = config.policies_to_train
    overrides = {
        mid: dict(values)
        for mid, values in config.algorithm_config_overrides_per_module.items()
        if all(isinstance(value, bool | int | float | str | None) for value in values.values())
    }
    plain_spaces = _plain_or_none(lambda: [space_to_plain(space) for space in spaces])
    return {
        "specs": specs,
        "multi_rl_module_class": class_name(filled.multi_rl_module_class),
        "overrides": overrides,
        "spaces": plain_spaces,
        "trained": {
            "module_ids": sorted(trained) if isinstance(trained, Collection) else None,
            "is_function": callable(trained),
            "is_changed": has_own_rule,
        },
    }


def _plain_or_none(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (NotPlainError, ConfigurationError):
        return None


def with_stored_modules(config: Any, stored: Mapping[str, Any], *, trust_code: bool = False) -> Any:
    """`config` with the modules that a checkpoint has: added and removed ones, too, and frozen ones.

    Args:
        config: The one that the run was built with, or that its checkpoint stored.
        stored: What `modules_to_store` returned; ``{}`` changes nothing.
        trust_code: Whether module classes are imported that only the checkpoint names.

    Raises:
        CheckpointError: A module's spec was not stored, or names a class that is not known here.
    """
    specs = stored.get("specs")
    if specs is None:
        return config
    for module_id in [mid for mid in config.module_ids if mid not in specs]:
        config = without_module(config, module_id)
    for module_id, plain in specs.items():
        if module_id in config.module_ids:
            continue
        config = with_module(
            config,
            module_id,
            stored_spec(config, module_id, plain, trust_code=trust_code),
            config_overrides=stored.get("overrides", {}).get(module_id),
        )
    rule = stored.get("trained", {})
    if rule.get("is_changed") and not rule["is_function"]:
        config = _training(config, rule["module_ids"])
    return config


def stored_spec(config: Any, module_id: str, plain: Any, *, trust_code: bool = False) -> RLModuleSpec:
    """The RLModuleSpec of a module that a checkpoint has and `config` has not."""
    if plain is None:
        raise CheckpointError(
            f"The checkpoint has a module {module_id!r} whose spec could not be stored. Pass a config whose "
            "policies have it."
        )
    known = {class_name(cls): cls for cls in _module_classes(config)}
    named = plain.get("module_class")
    module_class = known.get(named)
    if named is not None and module_class is None and not (trust_code or named.startswith("rlzmq.")):
        raise CheckpointError(
            f"The checkpoint's module {module_id!r} is of the class {named!r}, which the config does not "
            "name. Pass a config whose policies have it, or trust_code=True to import it."
        )
    spec = RLModuleSpec.from_dict(plain, module_class=module_class)
    spec.load_state_path = None  # the checkpoint's own weights come next
    return spec


def _module_classes(config: Any) -> list[type[RLModule]]:
    specs: list[Any] = list(config.policies.values()) if isinstance(config.policies, Mapping) else []
    outer = config.rl_module_spec
    specs += list(outer.rl_module_specs.values()) if isinstance(outer, MultiRLModuleSpec) else [outer]
    return [spec.module_class for spec in specs if getattr(spec, "module_class", None) is not None]
