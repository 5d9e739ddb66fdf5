"""Configs as plain data: dicts and TOML files, both ways, every key checked."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from rlzmq.algorithms.config_json import to_json
from rlzmq.algorithms.config_plain import load_named, plain_setting, revive_setting, setting_from_text
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import write_text
from rlzmq.core.suggest import did_you_mean

__all__ = ["ConfigIO", "load_named"]

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
        """A config of this class from `to_dict()`'s output, or any part of it.

        Raises:
            ConfigurationError: A key is unknown (the text names the closest), or a value is wrong.
        """
        return cls().update_from_dict(values)

    def update_from_dict(self, values: Mapping[str, Any]) -> Self:
        """Set several settings at once, to the values as they are; unknown keys are errors.

        Raises:
            ConfigurationError: As `from_dict`.
        """
        for name, value in values.items():
            if name not in self._values:
                raise ConfigurationError(
                    f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, self._values)}"
                )
            setattr(self, name, value)
        return self

    def get_state(self) -> dict[str, Any]:
        """The settings as plain msgpack-able data; importable functions and classes by their names.

        Raises:
            ConfigurationError: A value is neither plain nor importable, e.g. a lambda.
        """
        return {name: plain_setting(name, value) for name, value in self._values.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The config that `get_state` describes. Imports the code that it names.

        Raises:
            ConfigurationError: As `from_dict`, or the code is not here.
        """
        return cls.from_dict({name: revive_setting(value) for name, value in state.items()})

    def serialize(self) -> dict[str, Any]:
        """The settings as JSON data to log or to look at: functions without a name as their source.

        Nothing reads this back; `get_state`, `to_toml` and checkpoints are for that.
        """
        return {name: to_json(value) for name, value in self._values.items()}

    def to_toml(self, path: str | Path | None = None) -> str:
        """The settings that differ from the defaults as TOML, one table per setter.

        TOML has no None; settings that are None are listed as ``unset = ["name"]`` in their table, and keys of
        dicts that are None are left out.

        Args:
            path: Also write it there.
        """
        defaults = type(self)()._values
        tables: dict[str, list[str]] = {}
        unset: dict[str, list[str]] = {}
        for name, value in self._values.items():
            plain = plain_setting(name, value)
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
            write_text(Path(path), text)
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
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"Cannot read {path}: {error}.") from error
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
                revived = {name: setting_from_text(name, item) for name, item in settings.items()}
                self.update_from_dict({**revived, **dict.fromkeys(names)})
            elif key in self._values:
                self.update_from_dict({key: setting_from_text(key, value)})
            else:
                valid = {*groups, *self._values}
                raise ConfigurationError(
                    f"The config has no table or setting {key!r}.{did_you_mean(key, valid)}"
                )
        return self


def _plain_or_none(name: str, value: Any) -> Any:
    try:
        return plain_setting(name, value)
    except ConfigurationError:
        return None


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
