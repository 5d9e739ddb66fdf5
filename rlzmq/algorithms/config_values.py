"""Spaces, module specs and configs inside configs as plain data, so that files and checkpoints can hold them.

A class of the user's is written as ``"@package.module:Class"``, the mark that says: reading this runs code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlzmq.algorithms.algorithm_config import AlgorithmConfig
from rlzmq.algorithms.config_plain import CODE_MARK, plain_dict, plain_setting, revive_setting
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.plain import NotPlainError
from rlzmq.core.space_plain import space_from_plain, space_to_plain
from rlzmq.modules.class_names import class_name
from rlzmq.modules.model_config import DefaultModelConfig
from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec

__all__ = ["from_plain_value", "is_plain_value", "to_plain_value"]

_SPACE, _SPEC, _MULTI_SPEC = "__space__", "__rl_module_spec__", "__multi_rl_module_spec__"
_CONFIG = "__algorithm_config__"
_CLASSES = ("module_class", "multi_rl_module_class", "config_class")
_OWN = "rlzmq."


def to_plain_value(name: str, value: Any) -> dict[str, Any] | None:
    """The plain form of a space, module spec, model or algorithm config; None for any other kind of value.

    Raises:
        ConfigurationError: It cannot be written down; the text names the setting.
    """
    from gymnasium.spaces import Space

    try:
        if isinstance(value, Space):
            return {_SPACE: space_to_plain(value)}
        if isinstance(value, RLModuleSpec):
            return {_SPEC: _marked(name, value.to_dict())}
        if isinstance(value, MultiRLModuleSpec):
            return {_MULTI_SPEC: _marked(name, value.to_dict())}
        if isinstance(value, DefaultModelConfig):
            return plain_dict(name, value.to_dict())
        if isinstance(value, AlgorithmConfig):
            values = {key: plain_setting(f"{name}.{key}", item) for key, item in value.diff().items()}
            return {_CONFIG: _marked(name, {"config_class": class_name(type(value)), "values": values})}
    except NotPlainError as error:
        raise ConfigurationError(f"config.{name}: {error}") from None
    return None


def is_plain_value(value: Any) -> bool:
    """Whether `to_plain_value` wrote this."""
    return isinstance(value, dict) and len(value) == 1 and not value.keys().isdisjoint(_READERS)


def from_plain_value(plain: dict[str, Any], load: Callable[[str], Any]) -> Any:
    """The space, spec or config that `to_plain_value` wrote.

    Args:
        plain: A value of which `is_plain_value` is true.
        load: Gives the class that ``"package.module:Class"`` names; asked for marked ones.

    Raises:
        ConfigurationError: A class is named without the mark, or something is malformed.
    """
    ((kind, content),) = plain.items()
    return _READERS[kind](content, load)


def _marked(name: str, plain: dict[str, Any]) -> dict[str, Any]:
    """Classes that are not rlzmq's own get the mark, and a spec's model settings their plain form."""
    for key in _CLASSES:
        named = plain.get(key)
        if named is not None and not named.startswith(_OWN):
            if "<locals>" in named or named.startswith("__main__:"):
                raise ConfigurationError(
                    f"config.{name}: the class {named!r} cannot be written as plain data. Move it into an "
                    "importable module."
                )
            plain[key] = CODE_MARK + named
    if plain.get("model_config") is not None:
        plain["model_config"] = plain_dict(f"{name}.model_config", plain["model_config"])
    for spec in plain.get("rl_module_specs", {}).values():
        _marked(name, spec)
    return plain


def _class_of(plain: dict[str, Any], key: str, load: Callable[[str], Any]) -> Any:
    named = plain.get(key)
    if named is None:
        return None
    if named.startswith(CODE_MARK):
        return load(named[len(CODE_MARK) :])
    if not named.startswith(_OWN):
        raise ConfigurationError(f"{key}: expected a class of rlzmq's or one marked with '@', got {named!r}.")
    return load(named)


def _read_spec(plain: dict[str, Any], load: Callable[[str], Any]) -> RLModuleSpec:
    return RLModuleSpec.from_dict(
        {**plain, "module_class": None, "model_config": revive_setting(plain.get("model_config"))},
        module_class=_class_of(plain, "module_class", load),
    )


def _read_multi_spec(plain: dict[str, Any], load: Callable[[str], Any]) -> MultiRLModuleSpec:
    spec = MultiRLModuleSpec.from_dict(
        {**plain, "rl_module_specs": {}, "model_config": revive_setting(plain.get("model_config"))},
        multi_rl_module_class=_class_of(plain, "multi_rl_module_class", load),
    )
    spec.add_modules({mid: _read_spec(one, load) for mid, one in plain["rl_module_specs"].items()})
    return spec


def _read_config(plain: dict[str, Any], load: Callable[[str], Any]) -> AlgorithmConfig:
    config_class = _class_of(plain, "config_class", load)
    if not (isinstance(config_class, type) and issubclass(config_class, AlgorithmConfig)):
        raise ConfigurationError(f"expected a config class, got {plain.get('config_class')!r}.")
    return config_class.from_state(plain["values"])


_READERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    _SPACE: lambda plain, load: space_from_plain(plain),
    _SPEC: _read_spec,
    _MULTI_SPEC: _read_multi_spec,
    _CONFIG: _read_config,
}
