"""ConfigValues: stores the settings of a config, and converts them to plain data and TOML."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlzmq.config.groups import AllSettings
from rlzmq.config.plain import (
    CONFIG_TAG,
    copy_value,
    plain_setting,
    revive_setting,
    setting_from_text,
    to_json,
)
from rlzmq.config.rllib_only import accept_rllib_only, no_such_setting
from rlzmq.config.settings import Setting, settings_of
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import opener
from rlzmq.core.synonyms import SignatureOfInit, did_you_mean
from rlzmq.core.trust import CALLER, Trust
from rlzmq.envs.registry import adopt_registration, registration_of

__all__ = ["ConfigValues", "read_toml"]


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
    path = _file_of(source)
    if path is not None:
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
        raise ConfigurationError(f"{path or 'The config'} is not valid TOML: {error}.") from None


def _file_of(source: str | Path) -> Path | None:
    """Return the file that is meant; None if the source is TOML itself."""
    return Path(source) if isinstance(source, Path) or ("\n" not in source and "=" not in source) else None


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


def _plain_or_none(name: str, value: object) -> object:
    try:
        return plain_setting(name, value)
    except ConfigurationError:
        return None


def _toml(value: object) -> str:
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


class _DeclaresSettings(SignatureOfInit):
    """Metaclass that turns attributes assigned in a subclass's ``__init__`` into settings with defaults, as in RLlib.

    After ``__init__`` no further names can be added.
    """

    if not TYPE_CHECKING:  # to a type checker, calling a class gives an instance of that class

        def __call__(cls, *args: object, **kwargs: object) -> Any:
            parameters = inspect.signature(cls.__init__).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            for name in kwargs.keys() - parameters.keys() if not takes_any else ():
                text = no_such_setting(cls, name, cls._fields).partition(" has no setting ")[2]
                raise TypeError(f"{cls.__name__}() takes no settings, as {text}")
            config = super().__call__(*args, **kwargs)
            config._set_slots(_is_declared=True)
            return config


class ConfigValues(AllSettings, metaclass=_DeclaresSettings):
    """All settings of a run. Each one is checked when it is set.

    A subclass adds settings by inheriting groups or by assigning them in its ``__init__``. `_defaults` contains the
    defaults that differ from those of its bases.
    """

    # In slots, so that an instance's `__dict__` has the settings and nothing else.
    __slots__ = ("_algo_class", "_frozen", "_given", "_is_declared", "_of_modules")

    plain_tag: ClassVar[str] = CONFIG_TAG
    _fields: ClassVar[dict[str, Setting]] = {}
    _defaults: ClassVar[dict[str, Any]] = {}
    _given: set[str]
    _frozen: bool
    _is_declared: bool
    _algo_class: type | None
    _of_modules: dict[str, Self]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = settings_of(cls)
        inherited = super(cls, cls)._fields  # type: ignore[misc]
        cls._fields = {name: own[name] for name in {**inherited, **own} if name in own}
        cls._defaults = {**super(cls, cls)._defaults, **cls._defaults}  # type: ignore[misc]

    def __init__(self, algo_class: type | None = None) -> None:
        if not (algo_class is None or isinstance(algo_class, type)):
            instead = "environment(…)" if isinstance(algo_class, str) else "update_from_dict({…})"
            raise TypeError(
                f"{type(self).__name__}({algo_class!r}): settings are given to setters. "
                f"Instead: {type(self).__name__}().{instead}."
            )
        defaults = {name: field.default for name, field in self._fields.items()}
        vars(self).update({**defaults, **copy_value(self._defaults)})
        self._set_slots(
            _algo_class=algo_class, _frozen=False, _given=set(), _is_declared=False, _of_modules={}
        )

    def _set_slots(self, **slots: object) -> None:
        for name, value in slots.items():
            object.__setattr__(self, name, value)

    # -- access ---------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # type checkers know the settings as attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise AttributeError(no_such_setting(type(self), name, vars(self)))

    def __setattr__(self, name: str, value: object) -> None:
        if name == "algo_class":
            self._set_slots(_algo_class=value)
            return
        if name not in vars(self) and self._is_declared:
            if accept_rllib_only(self, name, value):
                return
            raise AttributeError(no_such_setting(type(self), name, vars(self)))
        if self._frozen:
            raise AttributeError(
                f"config.{name} cannot be set: this config is frozen, because an Algorithm was built from "
                "it. Change a copy: config.copy(copy_frozen=False)."
            )
        field = self._fields.get(name)
        vars(self)[name] = value if field is None else field.check(value)
        if self._is_declared:
            self._given.add(name)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def get(self, name: str, default: object = None) -> Any:
        """Return the value of a setting, or `default` if there is no such setting."""
        return getattr(self, name) if name in vars(self) else default

    def keys(self) -> list[str]:
        """Return the names of all settings."""
        return list(vars(self))

    def items(self) -> Iterator[tuple[str, Any]]:
        """Return an iterator over (name, value) of all settings."""
        return ((name, getattr(self, name)) for name in vars(self))

    def diff(self) -> dict[str, Any]:
        """Return the settings that differ from this class's defaults."""
        defaults = vars(type(self)())
        return {name: value for name, value in vars(self).items() if not _same(value, defaults.get(name))}

    def given(self) -> dict[str, Any]:
        """Return the settings that were set explicitly, including those set to their default."""
        return {name: vars(self)[name] for name in self._given}

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """Return a deep copy; it is frozen if `copy_frozen` is True, or if that is None and this config is frozen."""
        new = type(self)()
        vars(new).update(copy_value(vars(self)))
        new._set_slots(_algo_class=self._algo_class, _given=set(self._given))
        if isinstance(new.evaluation_config, ConfigValues) and copy_frozen is not None:
            vars(new)["evaluation_config"] = new.evaluation_config.copy(copy_frozen)
        if self._frozen if copy_frozen is None else copy_frozen:
            new.freeze()
        return new

    def freeze(self) -> None:
        """Make every later assignment raise AttributeError, including those to a config in `evaluation_config`."""
        self._set_slots(_frozen=True)
        if isinstance(self.evaluation_config, ConfigValues):
            self.evaluation_config.freeze()

    @property
    def is_frozen(self) -> bool:
        """Whether this config belongs to a built Algorithm and cannot be changed."""
        return bool(self._frozen)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.diff().items())
        return f"{type(self).__name__}({given})"

    def __getstate__(self) -> dict[str, Any]:
        slots = {name: getattr(self, name) for name in ConfigValues.__slots__}
        # So that a copy in another process knows the env.
        return {"slots": slots, "values": dict(vars(self)), "registration": registration_of(self.env)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        adopt_registration(state["registration"])
        self._set_slots(**state["slots"])
        vars(self).update(state["values"])

    # -- plain data -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name, with unconverted values (including functions and spaces)."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a config of this class from the output of `to_dict()`, or any part of it.

        Raises:
            ConfigurationError: A key is unknown (the text names the closest one), or a value is invalid.
        """
        return cls().update_from_dict(values)

    def update_from_dict(self, values: Mapping[str, Any]) -> Self:
        """Set several settings at once to unconverted values. Unknown keys are errors.

        Raises:
            ConfigurationError: See `from_dict`.
        """
        for name, value in values.items():
            if name in vars(self):
                setattr(self, name, value)
            elif not accept_rllib_only(self, name, value):
                raise ConfigurationError(no_such_setting(type(self), name, vars(self)))
        return self

    def get_state(self) -> dict[str, Any]:
        """Return the settings as plain data for msgpack, with importable functions and classes by name.

        Raises:
            ConfigurationError: A value is neither plain nor importable, e.g. a lambda.
        """
        return {name: plain_setting(name, value) for name, value in vars(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, trust: Trust | Collection[str] = ()) -> Self:
        """Return the config of a state from `get_state`.

        Args:
            state: The state.
            trust: Packages whose code it may name, besides rlzmq's own classes.

        Raises:
            ConfigurationError: See `from_dict`; or it names code that is not trusted or cannot be imported.
        """
        trusted = Trust.of(trust)
        return cls.from_dict({name: revive_setting(name, value, trusted) for name, value in state.items()})

    def to_stored(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Return a config's stored form: its class, the non-default settings, and the names of omitted ones.

        Returns:
            ``{"config": its nearest base class in this library, "config_class": its class, "overridden": [methods of
            the former that the latter overrides], "values": {name: plain data}, "left_out": {name: description}}``.
            What cannot be stored is "left_out". The values are those that differ from the defaults of either class, so
            that they suffice for both.
        """
        kind = type(self)
        built_in = next(base for base in kind.__mro__ if base.__module__.partition(".")[0] == "rlzmq")
        defaults = vars(built_in())
        differing = self.diff() | {
            name: value for name, value in vars(self).items() if not _same(value, defaults.get(name, value))
        }
        values, left_out = {}, {}
        for name, value in differing.items():
            if name in without:
                continue
            try:
                values[name] = plain_setting(name, value, in_script=True)
            except ConfigurationError:
                left_out[name] = str(getattr(value, "__qualname__", type(value).__name__))
        return {
            "config": built_in.__name__,
            "config_class": f"{kind.__module__}:{kind.__qualname__}",
            "overridden": sorted(
                name
                for base in kind.__mro__[: kind.__mro__.index(built_in)]
                for name, value in vars(base).items()
                if callable(value) and hasattr(built_in, name) and not name.startswith("__")
            ),
            "values": values,
            "left_out": left_out,
        }

    def serialize(self) -> dict[str, Any]:
        """Return the settings as JSON data, for logs and display, with unnamed functions as source code.

        This cannot be read back. For that, use `get_state`, `to_toml` or checkpoints.
        """
        return {name: to_json(value) for name, value in vars(self).items()}

    def to_toml(self, path: str | Path | None = None) -> str:
        """Return the settings that differ from the defaults as TOML, one table per setter.

        TOML has no None: settings that are None are listed as ``unset = ["name"]`` in their table, and dict entries
        that are None are left out.

        Args:
            path: File to write the TOML to, too.
        """
        text = toml_of(vars(self), vars(type(self)()), self._fields)
        if path is not None:
            with open(path, "w", encoding="utf-8", opener=opener) as file:
                file.write(text)
        return text

    @classmethod
    def from_toml(cls, source: str | Path, *, trust: Trust | Collection[str] = CALLER) -> Self:
        """Return a config from TOML text or a TOML file, with keys flat or in tables named after the setters.

        Args:
            source: The text or the file.
            trust: Packages whose code it may name; by default all, as in a file that you wrote.

        Raises:
            ConfigurationError: The file is missing, is not valid TOML, has an unknown key, or names code that is not
                trusted.
        """
        tables, path = read_toml(source), _file_of(source)
        try:
            return cls().update_from_tables(tables, Trust.of(trust))
        except ConfigurationError as error:
            if path is None:
                raise
            raise ConfigurationError(f"{path}: {error}") from error.__cause__

    def update_from_tables(self, data: Mapping[str, Any], trust: Trust = CALLER) -> Self:
        """Set the settings in parsed TOML, flat or in tables named after the setters.

        Raises:
            ConfigurationError: A table or setting is unknown, or a value is invalid.
        """
        return self.update_from_dict(settings_in(data, vars(self), self._fields, trust))


def _same(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (ValueError, TypeError):
        return a is b
