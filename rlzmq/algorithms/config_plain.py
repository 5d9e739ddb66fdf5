"""Setting values as plain data and back: what states, checkpoints and TOML files hold of a config.

Inside of dicts (env_config, say), whose values the user's code sees as they are, types are kept:

    tuple, set, frozenset       {"__tuple__": […]}, {"__set__": […]}, {"__frozenset__": […]}
    dict with other keys        {"__dict__": [[key, value], …]}
    bytes, complex, numpy       {"__plain__": …}, see rlzmq.core.plain
    function, class, enum       "@package.module:name", the mark that says: reading this runs code
    text that begins with "@"   with one more "@" before it
    space, spec, config         see config_values

Outside of dicts a tuple or set becomes a list, which the setters take as well.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.plain import NotPlainError, from_plain, to_plain

__all__ = [
    "CODE_MARK",
    "load_named",
    "names_code",
    "plain_dict",
    "plain_setting",
    "revive_setting",
    "setting_from_text",
]

CODE_MARK = "@"


def plain_setting(name: str, value: Any) -> Any:
    """The plain form of a setting's value.

    Args:
        name: The setting's, for error texts.
        value: Its value.

    Raises:
        ConfigurationError: It holds something that is neither plain nor importable, e.g. a lambda.
    """
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_setting(name, item) for item in _in_order(value)]
    return _encode(name, value)


def plain_dict(name: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """The plain form of a dict whose types are to be kept; raises as `plain_setting`."""
    if all(type(key) is str for key in value) and not _is_tagged(value):
        return {key: _encode(f"{name}.{key}", item) for key, item in value.items()}
    pairs = [[_encode(name, key), _encode(f"{name}.{key}", item)] for key, item in value.items()]
    return {"__dict__": pairs}


def revive_setting(value: Any) -> Any:
    """The value that `plain_setting` wrote. Imports the code that it names.

    Raises:
        ConfigurationError: The code is not here, or something is malformed.
    """
    if isinstance(value, str) and value.startswith(CODE_MARK):
        rest = value[len(CODE_MARK) :]
        return rest if rest.startswith(CODE_MARK) else load_named(rest)
    if isinstance(value, list):
        return [revive_setting(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {key: revive_setting(item) for key, item in value.items()}
    ((tag, content),) = value.items()
    if tag not in _READERS:
        from rlzmq.algorithms.config_values import from_plain_value

        return from_plain_value(value, load_named)
    try:
        return _READERS[tag](content)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"config: malformed {tag!r}: {error}.") from None


# What holds code is named "package.module:name" in files and on command lines that people write, as envs are.
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


def setting_from_text(name: str, value: Any) -> Any:
    """The value that a person wrote in a TOML file; imports the code that it names.

    Args:
        name: The setting's. Of one that holds code, ``"package.module:name"`` is what that names, with ``@`` before it
            or not.
        value: As parsed.

    Raises:
        ConfigurationError: The code is not here, or something is malformed.
    """
    if name in _HOLDS_CODE and isinstance(value, str) and not value.startswith(CODE_MARK):
        return load_named(value)
    return revive_setting(value)


def names_code(plain: Any) -> bool:
    """Whether reviving this would import code."""
    if isinstance(plain, str):
        return plain.startswith(CODE_MARK) and not plain.startswith(2 * CODE_MARK)
    if isinstance(plain, dict):
        return any(names_code(item) for item in plain.values())
    return isinstance(plain, list) and any(names_code(item) for item in plain)


def load_named(name: str) -> Any:
    """The object that ``"package.module:qualname"`` names.

    Raises:
        ConfigurationError: There is none.
    """
    module_name, _, qualname = name.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"Cannot load {name!r}: {error}. Expected 'package.module:name'.") from None
    return value


def _encode(name: str, value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if kind is str:
        return CODE_MARK + value if value.startswith(CODE_MARK) else value
    if kind is list:
        return [_encode(name, item) for item in value]
    if kind in (tuple, set, frozenset):
        return {f"__{kind.__name__}__": [_encode(name, item) for item in _in_order(value)]}
    if isinstance(value, bytes | complex | np.generic | np.ndarray):
        try:
            return {"__plain__": to_plain(value, f"config.{name}")}
        except NotPlainError as error:
            raise ConfigurationError(str(error)) from None
    if isinstance(value, Mapping):
        return plain_dict(name, value)
    named = _name_of_code(value)
    if named is not None:
        return CODE_MARK + named
    from rlzmq.algorithms.config_values import to_plain_value

    special = to_plain_value(name, value)
    if special is not None:
        return special
    raise ConfigurationError(
        f"config.{name}={value!r} cannot be written as plain data. Move it into an importable module as a "
        "named function or class, then it is stored as 'package.module:name'."
    )


def _name_of_code(value: Any) -> str | None:
    """``"package.module:name"`` of a function, class or enum member that can be imported; else None."""
    if isinstance(value, enum.Enum):
        outer = _name_of_code(type(value))
        return f"{outer}.{value.name}" if outer and value.name in type(value).__members__ else None
    qualname, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    if not callable(value) or not qualname or not module or "<" in qualname or module == "__main__":
        return None
    try:
        found = load_named(f"{module}:{qualname}")
    except ConfigurationError:
        return None
    return f"{module}:{qualname}" if found == value else None  # a bound method's name is that of the function


def _in_order(items: Any) -> list[Any]:
    """The items; those of a set in an order that is the same in every process."""
    if not isinstance(items, set | frozenset):
        return list(items)
    return sorted(items) if all(isinstance(item, str) for item in items) else sorted(items, key=repr)


def _is_tagged(value: Mapping[Any, Any]) -> bool:
    """Whether a dict is the plain form of something that is no dict with texts for keys (or looks like one)."""
    if len(value) != 1 or not str(key := next(iter(value))).startswith("__"):
        return False
    from rlzmq.algorithms.config_values import is_plain_value  # brings torch: a preset is read without it

    return key in _READERS or is_plain_value(value)


def _revived(items: Any) -> list[Any]:
    if not isinstance(items, list):
        raise TypeError(f"expected a list, got {type(items).__name__}")
    return [revive_setting(item) for item in items]


_READERS: dict[Any, Callable[[Any], Any]] = {
    "__tuple__": lambda items: tuple(_revived(items)),
    "__set__": lambda items: set(_revived(items)),
    "__frozenset__": lambda items: frozenset(_revived(items)),
    "__dict__": lambda pairs: dict(_revived(pairs)),
    "__plain__": from_plain,
}
