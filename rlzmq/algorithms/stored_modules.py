"""The modules of a run in checkpoints, and configs with the modules of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from rlzmq.algorithms.module_changes import training, with_module, without_module
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.class_names import class_name
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.plain import NotPlainError
from rlzmq.core.space_plain import space_to_plain
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

if TYPE_CHECKING:
    from rlzmq.modules.rl_module import RLModule

__all__ = ["modules_to_store", "stored_spec", "with_stored_modules"]


def modules_to_store(
    config: BaseConfig, spaces: tuple[Any, Any], *, has_own_rule: bool = False
) -> dict[str, Any]:
    """Return a checkpoint's plain data about the modules: specs, env spaces, and which are trained.

    Args:
        config: The config with the current modules.
        spaces: (observation space, action space) of one env.
        has_own_rule: Whether the run has changed which modules are trained (see `RunModules`).
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
        "multi_rl_module_class": class_name(filled.given_class),
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


def with_stored_modules(
    config: BaseConfig, stored: Mapping[str, Any], *, trust_code: bool = False
) -> BaseConfig:
    """Return `config` with the modules of a checkpoint, including added, removed and frozen ones.

    Args:
        config: The config that the run was built with, or that its checkpoint stored.
        stored: The return value of `modules_to_store`; ``{}`` changes nothing.
        trust_code: Whether to import module classes that only the checkpoint names.

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
            stored_spec(config, module_id, plain, trust_code=trust_code),
            config_overrides=stored.get("overrides", {}).get(module_id),
        )
    rule = stored.get("trained", {})
    if rule.get("is_changed") and not rule["is_function"]:
        config = training(config, rule["module_ids"])
    return config


def stored_spec(config: BaseConfig, module_id: str, plain: Any, *, trust_code: bool = False) -> RLModuleSpec:
    """Return the RLModuleSpec of a module that is in a checkpoint but not in `config`."""
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
    spec.load_state_path = None  # the checkpoint's weights are loaded later
    return spec


def _module_classes(config: BaseConfig) -> list[type[RLModule]]:
    specs: list[Any] = list(config.policies.values()) if isinstance(config.policies, Mapping) else []
    outer = config.rl_module_spec
    specs += list(outer.rl_module_specs.values()) if isinstance(outer, MultiRLModuleSpec) else [outer]
    return [spec.module_class for spec in specs if getattr(spec, "module_class", None) is not None]
