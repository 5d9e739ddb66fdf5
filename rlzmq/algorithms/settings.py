"""Checked settings: a configuration's keys, types and groups, read off its setters' signatures.

A setter is an ordinary method with typed keyword arguments. Decorated with :func:`setter`, its
signature is the schema: argument names are the only valid keys, annotations (pydantic) are what
values must be, and an argument that is not given changes nothing.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = [
    "Connector",
    "Fraction",
    "NonNegative",
    "NonNegativeInt",
    "NotProvided",
    "PositiveInt",
    "Schedule",
    "setter",
]


class _NotProvided:
    """The default of every setter argument, so that None is a value like any other."""

    def __repr__(self) -> str:
        return "NotProvided"

    def __copy__(self) -> _NotProvided:
        return self

    def __deepcopy__(self, memo: Any) -> _NotProvided:
        return self


NotProvided: Any = _NotProvided()

NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Gt(0)]
NonNegative = Annotated[float, Ge(0.0)]
Fraction = Annotated[float, Ge(0.0), Le(1.0)]
Schedule = float | list[tuple[float, float]]
"""A number, or ``[(0, v0), (t1, v1), …]``: piecewise linear over lifetime env steps."""

Connector = Callable[[Any, Any, Any], Any] | Callable[[Any, Any], Any] | Callable[..., Any] | None
"""What makes connector pieces. The forms with their arguments counted tell type checkers what a lambda is given."""

_Setter = TypeVar("_Setter", bound=Callable[..., Any])


class Field:
    """One setting: its group (the setter's name) and what its values must be."""

    def __init__(self, name: str, group: str, annotation: Any) -> None:
        self.name = name
        self.group = group
        self.annotation = annotation
        self._adapter: TypeAdapter[Any] | None = None

    def check(self, value: Any) -> Any:
        """The value, coerced where that loses nothing (an int for a float).

        Raises:
            ConfigurationError: Names the setting, what was expected and what came.
        """
        if self.annotation is Any:
            return value
        if self._adapter is None:
            try:
                self._adapter = TypeAdapter(self.annotation, config=ConfigDict(arbitrary_types_allowed=True))
            except PydanticUserError:
                self._adapter = TypeAdapter(self.annotation)
        if isinstance(value, enum.Enum) and typing.get_origin(self.annotation) is typing.Literal:
            value = value.value  # e.g. gymnasium.VectorizeMode
        if isinstance(value, bool) and _wants_number(self.annotation):
            raise ConfigurationError(f"config.{self.name}: expected {self.expected}, got {value!r} (a bool).")
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            problems = "; ".join(sorted({str(item["msg"]) for item in error.errors()})[:3])
            raise ConfigurationError(
                f"config.{self.name}: expected {self.expected}, got {value!r} "
                f"({type(value).__name__}): {problems}. Set it with .{self.group}({self.name}=…)."
            ) from None

    @property
    def expected(self) -> str:
        """The annotation as a reader would say it."""
        return _spell(self.annotation)


def setter(method: _Setter) -> _Setter:
    """Make a method of a config class a checked setter of the settings its arguments name."""
    signature = inspect.signature(method)
    parameters = [p for p in list(signature.parameters.values())[1:] if p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in parameters]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    group = method.__name__

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(positional):
            raise TypeError(
                f"{type(self).__name__}.{group}() takes at most {len(positional)} positional "
                f"argument(s), got {len(args)}: name them."
            )
        given = dict(zip(positional, args, strict=False))
        given.update(kwargs)
        own = {name: given.pop(name) for name in list(given) if name in names}
        if given and not takes_more:
            valid = fields_of_group(type(self), group)
            unknown = next(iter(given))
            raise TypeError(
                f"{type(self).__name__}.{group}() has no setting {unknown!r}."
                + (did_you_mean(unknown, valid) or "")
                + _other_group(type(self), unknown, group)
            )
        if given:
            getattr(super(wrapper.__owner__, self), group)(**given)  # type: ignore[attr-defined]
        for name, value in own.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    wrapper.__setting_names__ = names  # type: ignore[attr-defined]
    wrapper.__raw__ = method  # type: ignore[attr-defined]
    return typing.cast(_Setter, wrapper)


def collect_fields(cls: type) -> dict[str, Field]:
    """Every setting of a config class, by name, bases first."""
    fields: dict[str, Field] = {}
    for klass in reversed(cls.__mro__):
        for attribute in vars(klass).values():
            names = getattr(attribute, "__setting_names__", None)
            if names is None:
                continue
            attribute.__owner__ = klass
            hints = typing.get_type_hints(
                attribute.__raw__, vars(sys.modules[klass.__module__]), include_extras=True
            )
            for name in names:
                fields[name] = Field(name, attribute.__name__, hints.get(name, Any))
    return fields


def fields_of_group(cls: Any, group: str) -> list[str]:
    return [field.name for field in cls._fields.values() if field.group == group]


def _other_group(cls: Any, name: str, group: str) -> str:
    field = cls._fields.get(name)
    return f" ({name!r} is set with .{field.group}().)" if field and field.group != group else ""


def _wants_number(annotation: Any) -> bool:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    plain = [typing.get_args(o)[0] if typing.get_origin(o) is Annotated else o for o in options]
    return any(o in (int, float) for o in plain) and bool not in plain


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, type(int | str))


def _spell(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        base, *marks = typing.get_args(annotation)
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
    return str(annotation).replace("typing.", "")
