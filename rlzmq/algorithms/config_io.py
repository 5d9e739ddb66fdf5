"""Configs as plain data: dicts and TOML files, both ways, every key checked."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["ConfigIO", "load_named"]

_CALLABLE_MARK = "@"
_UNSET = "unset"  # TOML has no None: a table's ``unset = ["name"]`` lists the settings that are None
MAX_TOML_BYTES = 1 << 20  # a config is a page of text; more is a mistake or an attack


class ConfigIO:
    """The part of AlgorithmConfig that reads and writes plain data."""

    _values: dict[str, Any]
    _given: set[str]
    _fields: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, with the values as they are (functions and spaces included)."""
        return dict(self._values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config of this class from `to_dict()`'s or `get_state()`'s output, or any part of it.

        Raises:
            ConfigurationError: A key is unknown (the text names the closest), or a value is wrong.
        """
        return cls().update_from_dict(values)

    def update_from_dict(self, values: Mapping[str, Any]) -> Self:
        """Set several settings at once; unknown keys are errors.

        Raises:
            ConfigurationError: As `from_dict`.
        """
        for name, value in values.items():
            if name not in self._values:
                raise ConfigurationError(
                    f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, self._values)}"
                )
            setattr(self, name, _revive(value))
        return self

    def get_state(self) -> dict[str, Any]:
        """The settings as plain msgpack-able data; importable functions and classes by their names.

        Raises:
            ConfigurationError: A value is neither plain nor importable, e.g. a lambda.
        """
        return {name: _plain(name, value) for name, value in self._values.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The config that `get_state` describes."""
        return cls.from_dict(state)

    def to_toml(self, path: str | Path | None = None) -> str:
        """The settings that differ from the defaults as TOML, one table per setter.

        TOML has no None; settings that are None are listed as ``unset = ["name"]`` in their table.

        Args:
            path: Also write it there.
        """
        defaults = type(self)()._values
        tables: dict[str, list[str]] = {}
        unset: dict[str, list[str]] = {}
        for name, value in self._values.items():
            plain = _plain(name, value)
            default = _plain_or_none(name, defaults.get(name))
            field = self._fields.get(name)
            table = field.group if field else "callbacks"
            if plain == default:
                continue
            if plain is None:
                unset.setdefault(table, []).append(name)
            else:
                tables.setdefault(table, []).append(f"{name} = {_toml(plain)}")
        for table, names in unset.items():
            tables.setdefault(table, []).append(f"{_UNSET} = {_toml(names)}")
        text = "\n".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_toml(cls, source: str | Path) -> Self:
        """A config from TOML text or a file: keys flat, or in tables named as the setters.

        Raises:
            ConfigurationError: The file is missing, no TOML, or holds an unknown key.
        """
        text = source
        if isinstance(source, Path) or ("\n" not in source and "=" not in source):
            path = Path(source)
            if not path.is_file():
                raise ConfigurationError(f"No config file at {path}.")
            if path.stat().st_size > MAX_TOML_BYTES:
                raise ConfigurationError(
                    f"{path} holds {path.stat().st_size} bytes; at most {MAX_TOML_BYTES}."
                )
            text = path.read_text(encoding="utf-8")
        try:
            data = tomllib.loads(str(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"The config is no valid TOML: {error}.") from None
        return cls().update_from_tables(data)

    def update_from_tables(self, data: Mapping[str, Any]) -> Self:
        """Set what parsed TOML says: settings flat, or in tables named as the setters.

        Raises:
            ConfigurationError: A table or setting is unknown, or a value is wrong.
        """
        groups = {field.group for field in self._fields.values()} | {"callbacks"}
        for key, value in data.items():
            if key in groups and isinstance(value, dict):
                settings = dict(value)
                names = settings.pop(_UNSET, [])
                self.update_from_dict({**settings, **dict.fromkeys(names)})
            elif key in self._values:
                self.update_from_dict({key: value})
            else:
                valid = {*groups, *self._values}
                raise ConfigurationError(
                    f"The config has no table or setting {key!r}.{did_you_mean(key, valid)}"
                )
        return self


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


def _plain(name: str, value: Any) -> Any:
    from rlzmq.algorithms.config_values import to_plain_value

    if value is None or isinstance(value, bool | int | float | str):
        return value
    special = to_plain_value(name, value)
    if special is not None:
        return special
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(name, item) for item in items]
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return _plain(name, value.to_dict())
    qualname = getattr(value, "__qualname__", "")
    module = getattr(value, "__module__", "")
    if callable(value) and qualname and "<" not in qualname and module not in ("", "__main__"):
        return f"{_CALLABLE_MARK}{module}:{qualname}"
    raise ConfigurationError(
        f"config.{name}={value!r} cannot be written as plain data. Move it into an importable module as a "
        "named function or class, then it is stored as 'package.module:name'."
    )


def _plain_or_none(name: str, value: Any) -> Any:
    try:
        return _plain(name, value)
    except ConfigurationError:
        return None


def _revive(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_CALLABLE_MARK):
        return load_named(value[1:])
    if isinstance(value, dict):
        from rlzmq.algorithms.config_values import from_plain_value, is_plain_value

        if is_plain_value(value):
            return from_plain_value(value, load_named)
        return {key: _revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(pairs) + "}"
    raise ConfigurationError(f"{value!r} cannot be written as TOML.")
