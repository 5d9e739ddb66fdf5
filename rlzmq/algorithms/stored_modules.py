"""The modules of a run in checkpoints, and configs with the modules of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.module_changes import training, with_module, without_module
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import plain_dict
from rlzmq.connectors.connector_v2 import recorded_arguments
from rlzmq.connectors.defaults import users_pieces
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.plain import NotPlainError
from rlzmq.core.space_plain import space_to_plain
from rlzmq.core.trust import NOBODY, Trust, class_name, find_code
from rlzmq.episodes.multi_agent_episode import default_agent_to_module_mapping_fn
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

if TYPE_CHECKING:
    from rlzmq.modules.rl_module import RLModule

__all__ = ["ModuleClasses", "modules_to_store", "stored_spec", "with_stored_modules"]


def modules_to_store(
    config: BaseConfig, spaces: tuple[Any, Any], *, has_own_rule: bool = False
) -> dict[str, Any]:
    """Return a checkpoint's plain data about what acts (specs, spaces, agents, connector pieces) and what is trained.

    Args:
        config: The config with the current modules.
        spaces: (observation space, action space) of one env.
        has_own_rule: Whether the run has changed which modules are trained (see `RunModules`).
    """
    both = {"__env_single__": spaces, "__env__": spaces}
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
        "multi_rl_module_class": class_name(filled.given_class),
        "overrides": overrides,
        "spaces": plain_spaces,
        "is_multi_agent": config.is_multi_agent,
        "agents": _modules_of_agents(config, spaces) if config.is_multi_agent else [],
        "connectors": {
            name: _plain_pieces(config, name, {"env": None, "spaces": both, **more})
            for name, more in (("env_to_module_connector", {"device": None}), ("module_to_env_connector", {}))
        },
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


def _modules_of_agents(config: BaseConfig, spaces: tuple[Any, Any]) -> list[list[Any]]:
    """Return [agent id, module id] of the agents whose module does not depend on the episode."""
    fn = config.policy_mapping_fn or default_agent_to_module_mapping_fn
    found = []
    for agent_id in getattr(spaces[0], "spaces", {}):
        try:
            module_ids = {fn(agent_id, None) for _ in range(2)}
        except Exception:  # the user's function reads the episode
            continue
        if len(module_ids) == 1:
            found.append([agent_id, module_ids.pop()])
    return found


def _plain_pieces(config: BaseConfig, setting: str, arguments: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the user's pieces of a pipeline by class and constructor's arguments, which may be None if not plain."""
    with recorded_arguments() as made:
        try:
            pieces = users_pieces(config, setting, arguments)
        except Exception:  # the user's function needs an env
            return None
    found = []
    for piece in pieces:
        plain = None
        if id(piece) in made:
            _, args, kwargs = made[id(piece)]
            plain = _plain_or_none(lambda: plain_dict(setting, {"args": args, "kwargs": kwargs}))  # noqa: B023
        found.append({"class": class_name(type(piece)), "made_with": plain})
    return found


def with_stored_modules(config: BaseConfig, stored: Mapping[str, Any], classes: ModuleClasses) -> BaseConfig:
    """Return `config` with the modules of a checkpoint, including added, removed and frozen ones.

    Args:
        config: The config that the run was built with, or that its checkpoint stored.
        stored: The return value of `modules_to_store`; ``{}`` changes nothing.
        classes: Finds the classes of modules that only the checkpoint has.

    Raises:
        CheckpointError: A module's spec was not stored, or names an unknown class.
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
            stored_spec(config, module_id, plain, classes),
            config_overrides=stored.get("overrides", {}).get(module_id),
        )
    rule = stored.get("trained", {})
    if rule.get("is_changed") and not rule["is_function"]:
        config = training(config, rule["module_ids"])
    return config


@dataclass(frozen=True)
class ModuleClasses:
    """Where the classes of a checkpoint's modules come from.

    Attributes:
        given: A class, for all modules that are not of rlzmq's own classes, or classes by module id.
        trust: Whose classes the checkpoint may name.
    """

    given: Any = None
    trust: Trust = NOBODY

    def find(self, config: BaseConfig, module_id: str, named: str | None) -> type[RLModule] | None:
        """Return the class of a module; None for the algorithm's default.

        Raises:
            ConfigurationError: It is not given, nor named by `config`, nor trusted; or it cannot be found.
        """
        if isinstance(self.given, Mapping) and module_id in self.given:
            return self.given[module_id]  # type: ignore[no-any-return]
        if named is None:
            return None
        if isinstance(self.given, type) and not named.startswith("rlzmq."):
            return self.given
        known = {class_name(cls): cls for cls in _module_classes(config)}
        return known[named] if named in known else find_code(named, self.trust, object)


def stored_spec(
    config: BaseConfig, module_id: str, plain: Any, classes: ModuleClasses = ModuleClasses()
) -> RLModuleSpec:
    """Return the RLModuleSpec of a module of a checkpoint.

    Raises:
        CheckpointError: It was not stored, or its class is not to be had.
    """
    if plain is None:
        raise CheckpointError(
            f"The checkpoint has a module {module_id!r} whose spec could not be stored. Pass a config whose "
            "policies have it."
        )
    try:
        module_class = classes.find(config, module_id, plain.get("module_class"))
        spec = RLModuleSpec.from_dict({**plain, "module_class": None}, module_class=module_class)
    except (ConfigurationError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The class of the checkpoint's module {module_id!r}: {error} Pass it, module_class=…, or a config whose "
            "policies have it."
        ) from error
    spec.load_state_path = None  # the checkpoint's weights are loaded later
    return spec


def _module_classes(config: BaseConfig) -> list[type[RLModule]]:
    specs: list[Any] = list(config.policies.values()) if isinstance(config.policies, Mapping) else []
    outer = config.rl_module_spec
    specs += list(outer.rl_module_specs.values()) if isinstance(outer, MultiRLModuleSpec) else [outer]
    return [spec.module_class for spec in specs if getattr(spec, "module_class", None) is not None]
