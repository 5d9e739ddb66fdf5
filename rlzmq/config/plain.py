"""Conversion of setting values to plain data and back, for states, checkpoints and TOML files.

The tree of a value is that of `rlzmq.core.plain`, with two differences: arrays and bytes are base64 texts, so that JSON
and TOML can hold them, and a text that begins with "@" names code:

    function, class, enum       "@package.module:name"; reading imports it if it is trusted (`rlzmq.core.trust`)
        text that begins with "@"   with a second "@" at the beginning

Outside of dicts, tuples and sets become lists, which the setters also accept. Inside dicts such as env_config, which
are passed to user code unchanged, types are preserved.
"""

from __future__ import annotations

import base64
import copy
import enum
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.config.search_space import SEARCH_TAG, SearchObject, search_object_from_plain
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.plain import BYTES, NotPlainError, PlainType, TreeReader, TreeWriter, expect_list
from rlzmq.core.spaces import SPACE_TYPES
from rlzmq.core.trust import CALLER, Trust, class_name, find_code
from rlzmq.envs.registry import check_env_name

__all__ = [
    "CODE_MARK",
    "CONFIG_TAG",
    "MULTI_SPEC_TAG",
    "SPEC_TAG",
    "code_names",
    "copy_value",
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
_CLASSES = ("module_class", "multi_rl_module_class")


def _set_type(kind: type) -> PlainType:
    return PlainType(
        f"__{kind.__name__}__",
        kind,
        lambda w, v, where, depth: w.items(_in_order(v), where, depth),
        lambda r, c, depth: kind(r.read(expect_list(c), depth)),
    )


def _spec_type(tag: str, kind: str) -> PlainType:
    """Return the type of a kind of specs, which is in a higher layer: the constructor's arguments."""

    def write(writer: _Writer, spec: Any, where: str, depth: int) -> object:
        arguments = {name: vars(spec)[name] for name in spec.to_dict()}
        if arguments["load_state_path"] is not None:
            arguments["load_state_path"] = str(arguments["load_state_path"])
        tree = writer.write(arguments, where, depth + 1)
        for name in arguments.keys() & {*_CLASSES}:
            if arguments[name] is not None:
                tree[name] = writer.name_of(arguments[name], where)
        return tree

    def read(reader: _Reader, content: object, depth: int) -> object:
        arguments = reader.read(content, depth + 1)
        for name in arguments.keys() & {*_CLASSES}:
            if isinstance(arguments[name], str):  # without a mark
                arguments[name] = find_code(arguments[name], reader.trust, object)
        return find_code(kind, CALLER)(**arguments)

    return PlainType(tag, kind, write, read)


def _write_config(writer: _Writer, given: Any, where: str, depth: int) -> dict[str, Any]:
    values = {
        name: plain_setting(name, value, in_script=writer.in_script) for name, value in given.diff().items()
    }
    return {"config_class": writer.name_of(type(given), where), "values": values}


def _read_config(reader: _Reader, content: Mapping[str, Any], depth: int) -> object:
    named = content["config_class"]
    config_class = find_code(str(named).removeprefix(CODE_MARK), reader.trust, object)
    if getattr(config_class, "plain_tag", None) != CONFIG_TAG:
        raise ConfigurationError(f"expected a config class, got {named!r}.")
    return config_class.from_state(reader.trust.harmless(content["values"]), trust=reader.trust)


_TYPES = SPACE_TYPES.with_types(
    _set_type(set),
    _set_type(frozenset),
    PlainType(
        SEARCH_TAG,
        SearchObject,
        lambda w, v, where, depth: w.write(v.to_dict(), where, depth + 1),
        lambda r, c, depth: search_object_from_plain(r.read(c, depth + 1)),
        with_subclasses=True,
    ),
    _spec_type(SPEC_TAG, "rlzmq.modules.spec:RLModuleSpec"),
    _spec_type(MULTI_SPEC_TAG, "rlzmq.modules.multi_rl_module_spec:MultiRLModuleSpec"),
    PlainType(CONFIG_TAG, "rlzmq.config.values:ConfigValues", _write_config, _read_config),
    BYTES,
)


class _Writer(TreeWriter):
    """Converts a setting; see `plain_setting`."""

    types = _TYPES
    leaves = frozenset({type(None), bool, float})

    def __init__(self, in_script: bool) -> None:
        self.in_script = in_script

    def write(self, value: object, where: str = "value", depth: int = 0) -> Any:
        if type(value) is str:
            return CODE_MARK + value if value.startswith(CODE_MARK) else value
        named = _name_of_code(value, self.in_script)
        return super().write(value, where, depth) if named is None else CODE_MARK + named

    def name_of(self, cls: type[Any] | str, where: str) -> str:
        """Return the name of a class, which need not be importable here, with a mark."""
        named = class_name(cls)
        if "<locals>" in named or (named.startswith("__main__:") and not self.in_script):
            raise ConfigurationError(
                f"{where}: the class {named!r} cannot be written as plain data. Move it into an importable module."
            )
        return CODE_MARK + named

    def place(self, array: np.ndarray, where: str) -> list[Any]:
        dtype, shape, data = super().place(array, where)
        return [dtype, shape, base64.b64encode(data).decode()]

    def other(self, value: object, where: str, depth: int) -> Any:
        if isinstance(value, DefaultModelConfig):
            return self.write(value.to_dict(), where, depth)
        raise ConfigurationError(
            f"{where}={value!r} cannot be written as plain data. Move it into an importable module as a "
            "named function or class; it is then stored as 'package.module:name'."
        )


class _Reader(TreeReader):
    """Reads a setting; see `revive_setting`."""

    types = _TYPES
    leaves = frozenset({type(None), bool, int, float})

    def __init__(self, trust: Trust) -> None:
        self.trust = trust

    def read(self, tree: Any, depth: int = 0) -> Any:
        if isinstance(tree, list | dict):
            return super().read(tree, depth)
        if not isinstance(tree, str) or not tree.startswith(CODE_MARK):
            return tree
        rest = tree[len(CODE_MARK) :]
        return rest if rest.startswith(CODE_MARK) else find_code(rest, self.trust)

    def fetch(self, place: object) -> np.ndarray:
        dtype, shape, data = expect_list(place)
        return super().fetch([dtype, shape, base64.b64decode(data, validate=True)])


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
    try:
        return _Writer(in_script).write(value, f"config.{name}")
    except NotPlainError as error:
        raise ConfigurationError(str(error)) from None


def revive_setting(name: str, value: object, trust: Trust) -> Any:
    """Return the value of a plain form from `plain_setting`.

    Args:
        name: The setting's name. ``env`` and ``wrappers`` name code without a mark, also in ``evaluation_config``.
        value: The plain form.
        trust: Whose code may be imported.

    Raises:
        ConfigurationError: It names code that is not trusted or cannot be imported, or is malformed.
    """
    try:
        revived = _Reader(trust).read(value)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"config.{name}: malformed plain data: {error}") from None
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
