"""Conversion of setting values to plain data and back, for states, checkpoints and TOML files.

Inside dicts such as env_config, which are passed to user code unchanged, types are preserved:

    tuple, set, frozenset       {"__tuple__": […]}, {"__set__": […]}, {"__frozenset__": […]}
    dict with other keys        {"__dict__": [[key, value], …]}
    bytes, complex, numpy       {"__plain__": …}, see rlzmq.core.plain
    function, class, enum       "@package.module:name"; reading imports it if it is trusted (`rlzmq.core.trust`)
        text that begins with "@"   with a second "@" at the beginning
    space, spec, config         {"__space__": …}, {"__rl_module_spec__": …}, …; user classes in it have the mark
    search object               {"__search__": {"uniform": [0.0, 1.0]}}

Outside of dicts, tuples and sets become lists, which the setters also accept.
"""

from __future__ import annotations

import copy
import enum
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.config.search_space import SEARCH_TAG, SearchObject, search_object_from_plain
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.core.spaces import space_from_plain, space_to_plain
from rlzmq.core.trust import CALLER, Trust, class_name, find_code
from rlzmq.envs.registry import check_env_name

__all__ = [
    "CODE_MARK",
    "CONFIG_TAG",
    "MULTI_SPEC_TAG",
    "SPEC_TAG",
    "code_names",
    "copy_value",
    "plain_dict",
    "plain_setting",
    "revive_setting",
    "setting_from_text",
    "to_json",
]

CODE_MARK = "@"
_MAX_NUMBERS = 4096  # of an array in JSON, for readers

# Values of the class attribute `plain_tag`, which marks objects with a plain form.
CONFIG_TAG, SPEC_TAG, MULTI_SPEC_TAG = (
    "__algorithm_config__",
    "__rl_module_spec__",
    "__multi_rl_module_spec__",
)
# The spec classes are in a higher layer, so they are imported only when a spec is read.
_SPEC_CLASSES = {
    SPEC_TAG: "rlzmq.modules.spec:RLModuleSpec",
    MULTI_SPEC_TAG: "rlzmq.modules.multi_rl_module_spec:MultiRLModuleSpec",
}
_CLASSES = ("module_class", "multi_rl_module_class", "config_class")
_OWN = "rlzmq."


def plain_setting(name: str, value: object, *, in_script: bool = False) -> Any:
    """Return the plain form of a setting's value.

    Args:
        name: The setting's name.
        value: Its value.
        in_script: Whether code of the running script (``__main__``) has a name, because the same script may read it.

    Raises:
        ConfigurationError: It contains something that is neither plain nor importable, e.g. a lambda.
    """
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_setting(name, item, in_script=in_script) for item in _in_order(value)]
    return _encode(name, value, in_script)


def plain_dict(name: str, value: Mapping[Any, Any], *, in_script: bool = False) -> dict[str, Any]:
    """Return the plain form of a dict, with types preserved. Raises the errors of `plain_setting`."""
    if all(type(key) is str for key in value) and not _is_tagged(value):
        return {key: _encode(f"{name}.{key}", item, in_script) for key, item in value.items()}
    pairs = [
        [_encode(name, key, in_script), _encode(f"{name}.{key}", item, in_script)]
        for key, item in value.items()
    ]
    return {"__dict__": pairs}


def revive_setting(name: str, value: object, trust: Trust) -> Any:
    """Return the value of a plain form from `plain_setting`.

    Args:
        name: The setting's name. ``env`` and ``wrappers`` name code without a mark, also in ``evaluation_config``.
        value: The plain form.
        trust: Whose code may be imported.

    Raises:
        ConfigurationError: It names code that is not trusted or cannot be imported, or is malformed.
    """
    revived = _revived(value, trust)
    _check_env_names(name, revived, trust)
    return revived


def _check_env_names(name: str, value: object, trust: Trust) -> None:
    """Raise ConfigurationError if a setting names an environment or a wrapper that is not trusted."""
    if isinstance(value, SearchObject):
        value = list(value.examples())
    if isinstance(value, list | tuple):
        for item in value:
            _check_env_names(name, item, trust)
    elif name in ("env", "wrappers"):
        check_env_name(value, trust)
    elif name in ("evaluation_config", "algorithm_config_overrides_per_module") and isinstance(
        value, Mapping
    ):
        for key, item in value.items():
            _check_env_names(key if key in ("env", "wrappers") else name, item, trust)


def _revived(value: object, trust: Trust) -> object:
    if isinstance(value, str) and value.startswith(CODE_MARK):
        rest = value[len(CODE_MARK) :]
        return rest if rest.startswith(CODE_MARK) else find_code(rest, trust)
    if isinstance(value, list):
        return [_revived(item, trust) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {key: _revived(item, trust) for key, item in value.items()}
    ((tag, content),) = value.items()
    try:
        return _READERS[tag](content, trust)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"config: malformed {tag!r}: {error!r}.") from None


# Settings that hold code: files and command lines name it as "package.module:name", without a mark.
_HOLDS_CODE = frozenset(
    {
        "callbacks_class",
        "custom_evaluation_function",
        "env_runner_cls",
        "env_to_module_connector",
        "learner_class",
        "learner_connector",
        "module_to_env_connector",
        "policy_mapping_fn",
    }
)


def setting_from_text(name: str, value: object, trust: Trust = CALLER) -> Any:
    """Return the value of a setting in a hand-written TOML file. The code that it names is imported.

    Args:
        name: Name of the setting. If it holds code, ``"package.module:name"`` is imported, with or without ``@`` at
            the beginning.
        value: The parsed value.
        trust: Whose code may be imported.

    Raises:
        ConfigurationError: The code is not trusted or cannot be imported, or the data is malformed.
    """
    if name in _HOLDS_CODE and isinstance(value, str) and not value.startswith(CODE_MARK):
        return find_code(value, trust)
    return revive_setting(name, value, trust)


def code_names(plain: object) -> Iterator[str]:
    """Yield the names of the code that a plain form has marked."""
    if isinstance(plain, str):
        if plain.startswith(CODE_MARK) and not plain.startswith(2 * CODE_MARK):
            yield plain[len(CODE_MARK) :]
    elif isinstance(plain, dict | list):
        for item in plain.values() if isinstance(plain, dict) else plain:
            yield from code_names(item)


def _encode(name: str, value: Any, in_script: bool) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if kind is str:
        return CODE_MARK + value if value.startswith(CODE_MARK) else value
    if kind is list:
        return [_encode(name, item, in_script) for item in value]
    if kind in (tuple, set, frozenset):
        return {f"__{kind.__name__}__": [_encode(name, item, in_script) for item in _in_order(value)]}
    if isinstance(value, bytes | complex | np.generic | np.ndarray):
        try:
            return {"__plain__": to_plain(value, f"config.{name}")}
        except NotPlainError as error:
            raise ConfigurationError(str(error)) from None
    if isinstance(value, Mapping):
        return plain_dict(name, value, in_script=in_script)
    named = _name_of_code(value, in_script)
    if named is not None:
        return CODE_MARK + named
    try:
        if isinstance(value, Space):
            return {"__space__": space_to_plain(value)}
        if isinstance(value, DefaultModelConfig):
            return plain_dict(name, value.to_dict(), in_script=in_script)
        tag = getattr(value, "plain_tag", None)
        if tag == CONFIG_TAG:
            values = {
                key: plain_setting(f"{name}.{key}", item, in_script=in_script)
                for key, item in value.diff().items()
            }
            return {
                tag: _marked(name, {"config_class": class_name(type(value)), "values": values}, in_script)
            }
        if tag == SEARCH_TAG:
            return {tag: plain_dict(name, value.to_dict(), in_script=in_script)}
        if tag in _READERS:
            return {tag: _marked(name, value.to_dict(), in_script)}
    except NotPlainError as error:
        raise ConfigurationError(f"config.{name}: {error}") from None
    raise ConfigurationError(
        f"config.{name}={value!r} cannot be written as plain data. Move it into an importable module as a "
        "named function or class; it is then stored as 'package.module:name'."
    )


def _name_of_code(value: object, in_script: bool) -> str | None:
    """Return ``"package.module:name"`` of an importable function, class or enum member; else None."""
    if isinstance(value, enum.Enum):
        outer = _name_of_code(type(value), in_script)
        return f"{outer}.{value.name}" if outer and value.name in type(value).__members__ else None
    qualname, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    if not callable(value) or not qualname or not module or "<" in qualname:
        return None
    if module == "__main__" and not in_script:
        return None
    try:
        found = find_code(f"{module}:{qualname}", CALLER)
    except ConfigurationError:
        return None
    # A bound method has the same name as its function.
    return f"{module}:{qualname}" if found == value else None


def _in_order(items: Any) -> list[Any]:
    """Return the items as a list; a set's items in an order that is the same in every process."""
    if not isinstance(items, set | frozenset):
        return list(items)
    return sorted(items) if all(isinstance(item, str) for item in items) else sorted(items, key=repr)


def _is_tagged(value: Mapping[Any, Any]) -> bool:
    """Return whether a dict looks like the tagged form of another object."""
    return len(value) == 1 and next(iter(value)) in _READERS


def _items(items: object, trust: Trust) -> list[Any]:
    if not isinstance(items, list):
        raise TypeError(f"expected a list, got {type(items).__name__}")
    return [_revived(item, trust) for item in items]


def _marked(name: str, plain: dict[str, Any], in_script: bool) -> dict[str, Any]:
    """Mark classes from outside rlzmq, and convert the model settings of specs to plain data."""
    for key in _CLASSES:
        named = plain.get(key)
        if named is not None and not named.startswith(_OWN):
            if "<locals>" in named or (named.startswith("__main__:") and not in_script):
                raise ConfigurationError(
                    f"config.{name}: the class {named!r} cannot be written as plain data. Move it into an "
                    "importable module."
                )
            plain[key] = CODE_MARK + named
    if plain.get("model_config") is not None:
        plain["model_config"] = plain_dict(f"{name}.model_config", plain["model_config"], in_script=in_script)
    for spec in plain.get("rl_module_specs", {}).values():
        _marked(name, spec, in_script)
    return plain


def _class_of(plain: dict[str, Any], key: str, trust: Trust) -> Any:
    named = plain.get(key)
    return None if named is None else find_code(str(named).removeprefix(CODE_MARK), trust, object)


def _read_spec(plain: dict[str, Any], trust: Trust) -> object:
    return find_code(_SPEC_CLASSES[SPEC_TAG], CALLER).from_dict(
        {**plain, "module_class": None, "model_config": _revived(plain.get("model_config"), trust)},
        module_class=_class_of(plain, "module_class", trust),
    )


def _read_multi_spec(plain: dict[str, Any], trust: Trust) -> object:
    spec = find_code(_SPEC_CLASSES[MULTI_SPEC_TAG], CALLER).from_dict(
        {**plain, "rl_module_specs": {}, "model_config": _revived(plain.get("model_config"), trust)},
        multi_rl_module_class=_class_of(plain, "multi_rl_module_class", trust),
    )
    spec.add_modules({mid: _read_spec(one, trust) for mid, one in plain["rl_module_specs"].items()})
    return spec


def _read_config(plain: dict[str, Any], trust: Trust) -> Any:
    config_class = _class_of(plain, "config_class", trust)
    if getattr(config_class, "plain_tag", None) != CONFIG_TAG:
        raise ConfigurationError(f"expected a config class, got {plain.get('config_class')!r}.")
    return config_class.from_state(trust.harmless(plain["values"]), trust=trust)


_READERS: dict[Any, Callable[[Any, Trust], Any]] = {
    "__tuple__": lambda items, trust: tuple(_items(items, trust)),
    "__set__": lambda items, trust: set(_items(items, trust)),
    "__frozenset__": lambda items, trust: frozenset(_items(items, trust)),
    "__dict__": lambda pairs, trust: dict(_items(pairs, trust)),
    "__plain__": lambda plain, trust: from_plain(plain),
    "__space__": lambda plain, trust: space_from_plain(plain),
    SEARCH_TAG: lambda content, trust: search_object_from_plain(_revived(content, trust)),
    SPEC_TAG: _read_spec,
    MULTI_SPEC_TAG: _read_multi_spec,
    CONFIG_TAG: _read_config,
}


def copy_value(value: Any) -> Any:
    """Return a copy of containers, module specs and configs; spaces, classes and functions in them are shared."""
    if value is None or isinstance(value, str | int | float | type):
        return value
    if isinstance(value, dict):
        return {key: copy_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_value(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_value(item) for item in value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, DefaultModelConfig):
        return copy.deepcopy(value)
    tag = getattr(value, "plain_tag", None)
    if tag == CONFIG_TAG:
        return value.copy()
    if tag in (SPEC_TAG, MULTI_SPEC_TAG):
        new = copy.copy(value)
        vars(new).update({name: copy_value(item) for name, item in vars(value).items()})
        return new
    return value


def to_json(value: object) -> Any:
    """Return a value as nested None, bool, number, text, list or dict. Never fails; cannot be read back.

    A large array, e.g. a video, becomes a text that names its shape.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        is_small = value.size <= _MAX_NUMBERS
        return to_json(value.tolist()) if is_small else f"array of {value.dtype} {value.shape}"
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return [to_json(item) for item in sorted(value, key=repr)]
    if hasattr(value, "serialize") and not isinstance(value, type):  # an evaluation_config
        return value.serialize()
    qualname = getattr(value, "__qualname__", None)
    if not callable(value) or qualname is None:
        return repr(value)
    if "<" not in qualname:
        return f"{value.__module__}.{qualname}"
    try:
        return textwrap.dedent(inspect.getsource(value)).strip()
    except (OSError, TypeError):  # typed at a prompt, or without source
        return f"{value.__module__}.{qualname}"
