"""Configs as TOML text: one table per setter, every key checked."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlzmq.config.plain import plain_setting, setting_from_text
from rlzmq.config.settings import Setting
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.trust import Trust

__all__ = ["read_toml", "settings_in", "toml_of"]

_UNSET = "unset"  # TOML has no None, so a table's ``unset = ["name"]`` lists the settings that are None
_CALLBACKS = "callbacks"  # table of settings without a group
MAX_TOML_BYTES = 1 << 20  # a config is a page of text; a larger file is a mistake or an attack


def toml_of(values: Mapping[str, Any], defaults: Mapping[str, Any], fields: Mapping[str, Setting]) -> str:
    """Return the values that differ from the defaults as TOML, one table per setter."""
    tables: dict[str, list[str]] = {}
    unset: dict[str, list[str]] = {}
    for name, value in values.items():
        plain = plain_setting(name, value)
        table = _table_of(name, fields)
        if plain == _plain_or_none(name, defaults.get(name)):
            continue
        if plain is None:
            unset.setdefault(table, []).append(name)
        else:
            tables.setdefault(table, []).append(f"{name} = {_toml(plain)}")
    for table, names in unset.items():
        tables.setdefault(table, []).append(f"{_UNSET} = {_toml(names)}")
    return "\n".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())


def read_toml(source: str | Path) -> dict[str, Any]:
    """Return the tables of TOML text or of a TOML file.

    Raises:
        ConfigurationError: The file is missing or too large, or it is not valid TOML.
    """
    text = source
    if isinstance(source, Path) or ("\n" not in source and "=" not in source):
        path = Path(source)
        if not path.is_file():
            raise ConfigurationError(f"No config file at {path}.")
        if path.stat().st_size > MAX_TOML_BYTES:
            raise ConfigurationError(f"{path} holds {path.stat().st_size} bytes; at most {MAX_TOML_BYTES}.")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"Cannot read {path}: {error}.") from error
    try:
        return tomllib.loads(str(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"The config is not valid TOML: {error}.") from None


def settings_in(
    tables: Mapping[str, Any], values: Mapping[str, Any], fields: Mapping[str, Setting], trust: Trust
) -> dict[str, Any]:
    """Return the settings in parsed TOML, flat or in tables named after the setters.

    Raises:
        ConfigurationError: A table or setting is unknown, or named code is not trusted or cannot be imported.
    """
    groups = {_table_of(name, fields) for name in values} | {_CALLBACKS}
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if key in groups and isinstance(value, dict):
            settings = dict(value)
            names = settings.pop(_UNSET, [])
            found |= {name: setting_from_text(name, item, trust) for name, item in settings.items()}
            found |= dict.fromkeys(names)
        elif key in values:
            found[key] = setting_from_text(key, value, trust)
        else:
            raise ConfigurationError(
                f"The config has no table or setting {key!r}.{did_you_mean(key, {*groups, *values})}"
            )
    return found


def _table_of(name: str, fields: Mapping[str, Setting]) -> str:
    return (fields[name].group if name in fields else "") or _CALLBACKS


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
