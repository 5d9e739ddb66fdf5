"""Checked settings: groups of typed fields, and the config setters that take them.

A group is a class with one annotated attribute per setting, for its name, type and default. The class's docstring
explains them. A config class inherits the groups, so its settings are attributes for readers and type checkers.
`takes` turns a method into a setter whose arguments are the settings of a group; those not given are unchanged.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import numbers
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Predicate
from pydantic import ConfigDict, PydanticUserError, TypeAdapter

from rlzmq.config.rllib_only import accept_rllib_only, no_such_setting
from rlzmq.config.search_space import SearchObject, find_search_objects
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tracebacks import short_traceback

__all__ = [
    "Connector",
    "Fits",
    "Fraction",
    "LearningRate",
    "NonNegative",
    "NonNegativeInt",
    "NotProvided",
    "Positive",
    "PositiveInt",
    "Schedule",
    "Setting",
    "setting",
    "settings",
    "settings_of",
    "takes",
]


@dataclass(frozen=True, slots=True)
class Fits(Predicate):
    """Mark of an annotation: the values for which the function is true, described in words."""

    words: str = ""


class _NotProvided:
    """The default of every setter argument, so that None is an ordinary value."""

    def __repr__(self) -> str:
        return "NotProvided"

    def __copy__(self) -> _NotProvided:
        return self

    def __deepcopy__(self, memo: object) -> _NotProvided:
        return self


NotProvided: Any = _NotProvided()

NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Gt(0)]
NonNegative = Annotated[float, Ge(0.0)]
Positive = Annotated[float, Gt(0.0)]
Fraction = Annotated[float, Ge(0.0), Le(1.0)]
Schedule = float | list[tuple[float, float]]
"""A number, or ``[(0, v0), (t1, v1), …]``: piecewise linear over lifetime env steps."""

LearningRate = NonNegative | list[tuple[float, NonNegative]]
"""A `Schedule` of numbers >= 0."""

Connector = Callable[[Any, Any, Any], Any] | Callable[[Any, Any], Any] | Callable[..., Any] | None
"""A callable that creates connector pieces. The explicit signatures let type checkers infer a lambda's arguments."""

_Group = TypeVar("_Group", bound=type)
_Config = TypeVar("_Config")
_Arguments = ParamSpec("_Arguments")


class Setting:
    """One setting of a group, an attribute of the class. A config's attribute of this name is its value.

    Attributes:
        name: Name of the setting.
        group: Name of the setter that takes it; "" if there is none.
        annotation: Type of its values.
        doc: Its entry in the group's docstring.
    """

    def __init__(self, default: object, *, kw_only: bool = True) -> None:
        self.name = self.group = self.doc = ""
        self.annotation: Any = Any
        self._default = default
        self._kw_only = kw_only
        self._adapter: TypeAdapter[Any] | None = None

    @property
    def default(self) -> Any:
        """A new copy of the default value."""
        return copy.deepcopy(self._default)

    @property
    def parameter(self) -> inspect.Parameter:
        """The setter's parameter for this setting."""
        kind = inspect.Parameter.KEYWORD_ONLY if self._kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Parameter(self.name, kind, default=NotProvided, annotation=self.annotation)

    def check(self, value: object) -> Any:
        """Return the value, converted if that is lossless (e.g. an int to a float).

        A search object is returned unchanged, after a check of its possible values.

        Raises:
            ConfigurationError: The value is invalid; the text names the setting, the expected and the actual value.
        """
        if not isinstance(value, SearchObject):
            return self._checked(value)
        for example in value.examples():
            self._checked(example, f" {value} draws such values; see also tune.randint, tune.choice.")
        return value

    def _checked(self, value: object, note: str = "") -> Any:
        if self.annotation is Any:
            return value
        if self._adapter is None:
            try:
                self._adapter = TypeAdapter(self.annotation, config=ConfigDict(arbitrary_types_allowed=True))
            except PydanticUserError:
                self._adapter = TypeAdapter(self.annotation)
        if typing.get_origin(self.annotation) is typing.Literal:
            value = value.value if isinstance(value, enum.Enum) else value  # e.g. gymnasium.VectorizeMode
            words = typing.get_args(self.annotation)
            if isinstance(value, str) and value.lower() in words:  # RLlib's "ASYNC"
                value = value.lower()
        if isinstance(value, bool) and _wants_number(self.annotation):
            raise ConfigurationError(f"config.{self.name}: expected {self.expected}, got {value!r} (a bool).")
        try:
            if isinstance(value, numbers.Real) and value != value:  # NaN
                raise ValueError
            return self._adapter.validate_python(value)
        except ValueError:
            if find_search_objects(value):
                return value  # it is checked when a trial's values replace the search objects
            kind = "class" if isinstance(value, type) else type(value).__name__
            raise ConfigurationError(
                f"config.{self.name}: expected {self.expected}, got {value!r} ({kind}). "
                f"Set it with .{self.group}({self.name}=…).{note}"
            ) from None

    def nearest(self, number: float) -> float:
        """Return the number within the setting's bounds that is nearest to `number`."""
        for part in (self.annotation, *typing.get_args(self.annotation)):
            for bound in getattr(part, "__metadata__", ()):
                least = getattr(bound, "gt", number - 1) + isinstance(number, int)
                number = max(number, getattr(bound, "ge", number), least)
                number = min(number, getattr(bound, "le", number))
        return number

    @property
    def expected(self) -> str:
        """The annotation as readable text."""
        return _spell(self.annotation)


def setting(*, default: object, kw_only: bool = True) -> Any:
    """Declare a setting with a default, which each config copies.

    Args:
        default: The default value.
        kw_only: If False, the setter also accepts it by position.
    """
    return Setting(default, kw_only=kw_only)


@dataclass_transform(kw_only_default=True, field_specifiers=(setting,))
def settings(group: _Group) -> _Group:
    """Turn a class into a group of settings, one for each annotated attribute."""
    docs = _docs(group)
    for name, annotation in typing.get_type_hints(group, include_extras=True).items():
        if name not in vars(group):
            continue  # inherited
        value = vars(group)[name]
        declared = value if isinstance(value, Setting) else setting(default=value)
        declared.name, declared.annotation, declared.doc = name, annotation, docs.get(name, "")
        setattr(group, name, declared)
    return group


def settings_of(cls: type) -> dict[str, Setting]:
    """Return the settings of a group or config class by name, in the order of its bases.

    An argument with the name of a setter, ``framework``, is none: its only value has no effect.
    """
    found: dict[str, Setting] = {}
    for klass in cls.__mro__:
        for name, value in vars(klass).items():
            if isinstance(value, Setting) and not inspect.isfunction(getattr(cls, name)):
                found.setdefault(name, value)
    return found


class takes(Generic[_Arguments]):
    """Decorator that makes a config method the checked setter of a group; its arguments are the group's settings.

    The decorated method has only a name and a summary. Its signature and docstring come from the group.
    """

    def __init__(self, group: Callable[_Arguments, object]) -> None:
        self._group = typing.cast(type, group)

    def __call__(
        self, method: Callable[[_Config], _Config]
    ) -> Callable[Concatenate[_Config, _Arguments], _Config]:
        name = method.__name__
        group = self._group
        fields = settings_of(group)
        for field in fields.values():
            field.group = name
        parameters = [field.parameter for field in fields.values()]
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

        @short_traceback
        @functools.wraps(method)
        def setter(self: object, *args: object, **kwargs: object) -> Any:
            if len(args) > len(positional):
                raise TypeError(
                    f"{type(self).__name__}.{name}() takes at most {len(positional)} positional "
                    f"argument(s), got {len(args)}: name them."
                )
            given = {**dict(zip(positional, args, strict=False)), **kwargs}
            for unknown in [key for key in given if key not in fields]:
                if not accept_rllib_only(self, unknown, given[unknown], name):
                    raise TypeError(no_such_setting(type(self), unknown, fields, name))
            for key, value in given.items():
                if key in fields and value is not NotProvided:
                    setattr(self, key, value)
            return self

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        setter.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        setter.__annotations__ = {p.name: p.annotation for p in parameters}
        setter.__doc__ = group.__doc__
        return typing.cast(Callable[Concatenate[_Config, _Arguments], _Config], setter)


def _docs(group: type) -> dict[str, str]:
    """Return each setting's entry under "Args:" in the group's docstring, on one line."""
    entries = inspect.cleandoc(group.__doc__ or "").partition("Args:")[2]
    matches = re.finditer(r"^    (\w+(?:, \w+)*): (.+(?:\n {8,}.+)*)", entries, re.MULTILINE)
    return {name: " ".join(m[2].split()) for m in matches for name in m[1].split(", ")}


def _wants_number(annotation: object) -> bool:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    plain = [typing.get_args(o)[0] if typing.get_origin(o) is Annotated else o for o in options]
    return any(o in (int, float) for o in plain) and bool not in plain


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, type(int | str))


def _spell(annotation: object) -> str:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        base, *marks = typing.get_args(annotation)
        if words := [mark.words for mark in marks if isinstance(mark, Fits)]:
            return words[0]
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        bounds = [
            f"{sign} {getattr(m, key)}" for m in marks for key, sign in signs.items() if hasattr(m, key)
        ]
        return f"{_spell(base)} {' and '.join(bounds)}".strip()
    if _is_union(annotation):
        return " or ".join(dict.fromkeys(_spell(option) for option in typing.get_args(annotation)))
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    if origin is Callable:
        return "a callable"
    if origin is None and isinstance(annotation, type):
        return annotation.__name__
    if origin in (list, tuple):
        return f"{origin.__name__}[{', '.join(map(_spell, typing.get_args(annotation)))}]"
    return str(annotation).replace("typing.", "")
