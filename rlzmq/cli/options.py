"""Command-line options, generated from a config class: every setting is a flag with its help and default."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rlzmq.cli.parsing import flag_of
from rlzmq.config.plain import setting_from_text
from rlzmq.config.search_space import SearchObject, grid_search, lograndint, loguniform, randint, uniform
from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.wrappers import split_wrappers

if TYPE_CHECKING:
    from rlzmq.config.base_config import BaseConfig

__all__ = ["apply_settings", "options_type", "table_from_texts"]

_ALIASES = {
    "num_env_runners": "--env-runners",
    "num_envs_per_env_runner": "--envs-per-env-runner",
    "num_learners": "--learners",
    "train_batch_size_per_learner": "--batch-size-per-learner",
}
_NUMBER = r"[-+]?[\d.]*\d(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")  # 1e-4..1e-2:log
_LIST = re.compile(rf"{_NUMBER}(?:,{_NUMBER})+")
_NAMES = ("policies", "policies_to_train")
# No flags of other algorithms: what only offline ones read.
_OF_OFFLINE = ("input_", "dataset_", "offline_eval")
_METAVARS = {
    bool: "true|false",
    int: "INT",
    float: "NUMBER",
    str: "TEXT",
    list: "JSON",
    dict: "KEY=VALUE|JSON",
}
# Of settings that are other objects in Python.
_METAVARS_OF = {
    "model_config": _METAVARS[dict],
    "evaluation_config": _METAVARS[dict],
    **dict.fromkeys(_NAMES, "ID,ID,…"),
    "policy_mapping_fn": "PACKAGE.MODULE:NAME",
    "wrappers": "NAME,NAME(KEY=VALUE),…",
}


def options_type(config_class: type[BaseConfig], name: str, base: type) -> type:
    """Return a dataclass for tyro: the fields of `base`, then one dataclass per setter with a field per setting.

    Settings that hold code (connectors, callbacks, …) have no flag, except for the mapping of agents to modules. All
    flags are texts; the config checks them (`apply_settings`).
    """
    import tyro

    defaults = config_class()
    taken = {field.name for field in dataclasses.fields(base)}
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    for setting, field in config_class._fields.items():
        metavar = _metavar(setting, field.annotation)
        if metavar is None or not field.group or setting in taken or setting.startswith("_"):
            continue
        if setting.startswith(_OF_OFFLINE) and defaults.is_online:
            continue
        doc = re.sub(r"\bNone\b", "none", field.doc.replace("`", "")).rstrip(".") or field.name
        text = f"{doc} (default: {_shown(vars(defaults).get(setting))})"
        aliases = [_ALIASES[setting]] if setting in _ALIASES else None
        flag = flag_of(setting)[2:]
        marks = tyro.conf.arg(name=flag, help=text, metavar=metavar, help_behavior_hint="", aliases=aliases)
        is_table = metavar == _METAVARS[dict]
        kind: Any = Annotated[list[str] if is_table else str, marks]
        default = dataclasses.field(default_factory=list) if is_table else dataclasses.field(default="")
        groups.setdefault(field.group, []).append((setting, kind, default))
    fields: list[tuple[str, Any, Any]] = []
    for group, members in groups.items():
        members_type = dataclasses.make_dataclass(group, members)
        about = (getattr(config_class, group).__doc__ or "").partition("\n")[0]
        members_type.__doc__ = about.partition(", in addition to")[0].rstrip(".") + "."
        title = tyro.conf.arg(name=group.replace("_", " "), help=members_type.__doc__)
        fields.append(
            (
                f"group_{group}",
                Annotated[members_type, title],
                dataclasses.field(default_factory=members_type),
            )
        )
    return dataclasses.make_dataclass(name, fields, bases=(base,), kw_only=True)


def apply_settings(config: BaseConfig, options: Any) -> None:
    """Set on `config` every setting that was given as a flag.

    Raises:
        ConfigurationError: A value is invalid; the text names the flag, the expected and the actual value.
    """
    for field in dataclasses.fields(options):
        if not field.name.startswith("group_"):
            continue
        for setting, given in vars(getattr(options, field.name)).items():
            if not given:
                continue
            is_table = isinstance(given, list)
            try:
                value = table_from_texts(setting, given) if is_table else _value(config, setting, given)
                setattr(config, setting, value)
            except ConfigurationError as error:
                text = str(error).replace(f"config.{setting}", flag_of(setting))
                is_range = ".." in given or (given[0].isdigit() and ":" in given)  # 1e-4:1e-2
                more = " A range is LOW..HIGH or LOW..HIGH:log." if is_range else ""
                raise ConfigurationError(text.partition(" Set it with .")[0] + more) from None


def _value(config: BaseConfig, setting: str, text: str) -> object:
    """Convert a flag's text: JSON, Python's True, False and None, or the text itself."""
    if setting == "policy_mapping_fn":
        return setting_from_text(setting, text)
    if setting == "wrappers":
        return split_wrappers(text)
    if setting in _NAMES:
        return _parsed_json(text, default=None) or [name.strip() for name in text.split(",") if name.strip()]
    options = _options_of(type(config)._fields[setting].annotation)
    if text.lower() in ("none", "null") and type(None) in options:
        return None
    if str in options:
        return text
    if (searched := _search_object(text, options)) is not None:
        return searched
    if text.lower() in ("true", "false") and bool in options:
        return text.lower() == "true"
    return _parsed_json(text, default=text)


def _search_object(text: str, options: list[Any]) -> SearchObject | None:
    """Return what a range of numbers or a list of them stands for: what `rlzmq tune` searches."""
    if int not in options and float not in options:
        return None
    searched: SearchObject | None = None
    if _LIST.fullmatch(text):
        searched = grid_search([json.loads(number) for number in text.split(",")])
    elif (found := _RANGE.fullmatch(text)) is not None:
        lower, upper, is_log = found.groups()
        if int in options and lower.isdigit() and upper.isdigit():
            searched = (lograndint if is_log else randint)(int(lower), int(upper) + 1)
        else:
            searched = (loguniform if is_log else uniform)(float(lower), float(upper))
    return searched


def table_from_texts(setting: str, texts: list[str]) -> dict[str, Any]:
    """Build a dict from ``key=value`` pairs, JSON objects and TOML inline tables; later ones win.

    Raises:
        ConfigurationError: A text has none of these forms.
    """
    table: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if text.lstrip().startswith("{"):
            part = _parsed_json(text, default=None)
            part = _parsed_toml(f"table = {text}").get("table") if part is None else part
        elif separator and key.strip():
            part = _parsed_toml(text) or {key.strip(): _parsed_json(value, default=value)}
        else:
            part = None
        if not isinstance(part, dict):
            raise ConfigurationError(
                f"{flag_of(setting)} {text!r}: expected key=value (repeat the flag for more), a JSON object such as "
                "'{\"key\": 3}', or a TOML inline table such as '{key = 3}'."
            )
        table.update(part)
    return table


def _parsed_json(text: str, *, default: object) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return default


def _parsed_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _metavar(setting: str, annotation: object) -> str | None:
    """Return the placeholder of a flag's value; None if a setting cannot be given as text."""
    if setting in _METAVARS_OF:
        return _METAVARS_OF[setting]
    parts: list[str] = []
    for option in _options_of(annotation):
        kind = typing.get_origin(option) or option
        if kind is Literal:
            parts += map(str, typing.get_args(option))
        elif kind is type(None):
            parts.append("none")
        elif kind in _METAVARS:
            parts.append(_METAVARS[kind])
        else:
            return None
    return "|".join(parts)


def _options_of(annotation: object) -> list[Any]:
    """Return the members of a union without their bounds; for another type, the type itself."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _options_of(typing.get_args(annotation)[0])
    if origin is typing.Union or isinstance(annotation, type(int | str)):
        return [option for member in typing.get_args(annotation) for option in _options_of(member)]
    return [annotation]


def _shown(value: object) -> str:
    """Format a default as a user would type it."""
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, default=str)
