"""Command-line options, generated from a config class: every setting is a flag with its help and default."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from typing import Annotated, Any, Literal

__all__ = ["apply_settings", "options_type"]

_ALIASES = {
    "num_env_runners": "--env-runners",
    "num_envs_per_env_runner": "--envs-per-env-runner",
    "num_learners": "--learners",
    "train_batch_size_per_learner": "--batch-size-per-learner",
}
_SIMPLE = (bool, int, float, str)
_AS_JSON = ("model_config", "evaluation_config")  # take objects from Python, dicts from here


def options_type(config_class: Any, name: str, base: type) -> type:
    """A dataclass for tyro: `base`'s fields, then one optional field per setting of `config_class`.

    Settings that hold code (connectors, callbacks, …) have no flag; those with structure (dicts,
    schedules) are written as JSON. ``--import`` is among the options here: `base` need not import tyro for it.
    """
    import tyro

    defaults = config_class()
    helps = _setting_helps(config_class)
    taken = {field.name for field in dataclasses.fields(base)}
    named = tyro.conf.arg(name="import", help="Module to import first; repeatable (default: none).")
    importing: Any = Annotated[list[str], named]
    fields: list[tuple[str, Any, Any]] = [("import_", importing, dataclasses.field(default_factory=list))]
    for setting, field in config_class._fields.items():
        option_type = str if setting in _AS_JSON else _option_type(field.annotation)
        if option_type is None or setting in taken or setting.startswith("_"):
            continue
        default = defaults._values.get(setting)
        text = f"{helps.get(setting, setting)} (default: {json.dumps(default, default=str)})"
        aliases = [_ALIASES[setting]] if setting in _ALIASES else None
        marks = tyro.conf.arg(help=text, help_behavior_hint="", aliases=aliases)
        annotated: Any = Annotated[option_type | None, marks]
        fields.append((setting, annotated, dataclasses.field(default=None)))
    return dataclasses.make_dataclass(name, fields, bases=(base,), kw_only=True)


def apply_settings(config: Any, options: Any) -> None:
    """Set on `config` every setting that was given as a flag."""
    for setting, field in type(config)._fields.items():
        value = getattr(options, setting, None)
        if value is None:
            continue
        if isinstance(value, str) and (setting in _AS_JSON or _option_type(field.annotation) is str):
            value = _parsed(value)
        setattr(config, setting, value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _option_type(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _option_type(typing.get_args(annotation)[0])
    if annotation in _SIMPLE:
        return annotation
    if origin is Literal:
        return annotation
    if origin is dict or annotation is Any:
        return str if origin is dict else None
    if origin is typing.Union or isinstance(annotation, type(int | str)):
        options = [option for option in typing.get_args(annotation) if option is not type(None)]
        if any("Callable" in str(option) for option in options):
            return None
        kinds = [_option_type(option) for option in options]
        if len(kinds) == 1:
            return kinds[0]
        return (
            str
            if any(kind is not None or "list" in str(o) for kind, o in zip(kinds, options, strict=True))
            else None
        )
    return None


def _setting_helps(config_class: Any) -> dict[str, str]:
    """Setting -> first sentence of its line in the setter's docstring."""
    helps: dict[str, str] = {}
    for klass in reversed(config_class.__mro__):
        for attribute in vars(klass).values():
            names = getattr(attribute, "__setting_names__", None)
            if names is None:
                continue
            lines = (attribute.__doc__ or "").partition("Args:")[2]
            for match in re.finditer(r"^ +(\w+): (.+(?:\n {16,}.+)*)", lines, re.MULTILINE):
                helps[match[1]] = " ".join(match[2].split()).rstrip(".")
    return helps
