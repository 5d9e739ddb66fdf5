"""Search objects: values of a config that a Tuner resolves for each trial, such as ``loguniform(1e-5, 1e-2)``.

They may be anywhere in a config: as the value of a setting, and inside dicts, lists, tuples, `functools.partial`
arguments (for example of a connector), dataclasses such as DefaultModelConfig, module specs and nested configs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean

__all__ = [
    "SEARCH_FUNCTIONS",
    "SEARCH_TAG",
    "Categorical",
    "Domain",
    "Function",
    "GridSearch",
    "Numeric",
    "SearchObject",
    "choice",
    "find_search_objects",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "replace_values",
    "sample_from",
    "search_object_from_plain",
    "search_objects_in_tables",
    "uniform",
]

SEARCH_TAG = "__search__"
"""Value of ``plain_tag`` of search objects."""

_NORMAL = statistics.NormalDist()
_GOLDEN = 0.618  # of no range that people write is this place an int


class SearchObject:
    """Base class of values that stand for several possible values.

    Attributes:
        call: The function and arguments that create it, e.g. ``("uniform", (0.0, 1.0))``.
    """

    plain_tag: ClassVar[str] = SEARCH_TAG
    call: tuple[str, tuple[Any, ...]]

    def examples(self) -> Sequence[Any]:
        """Return possible values, for checks against a setting's type; [] if there are none."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return ``{function: [arguments]}``, the form of search objects in TOML files."""
        name, arguments = self.call
        return {name: list(arguments)}

    def __repr__(self) -> str:
        name, arguments = self.call
        return f"{name}({', '.join(map(repr, arguments))})"


class Domain(SearchObject):
    """A search object from which values are drawn, by Optuna."""


@dataclasses.dataclass(frozen=True, repr=False)
class _Listed(SearchObject):
    """A search object with a list of values."""

    values: tuple[Any, ...]
    call: tuple[str, tuple[Any, ...]]

    def examples(self) -> Sequence[Any]:
        """Return the values."""
        return self.values


class GridSearch(_Listed):
    """All of these values, each in its own trial, combined with the values of other grids."""


class Categorical(_Listed, Domain):
    """One of a list of values, each with the same probability."""


@dataclasses.dataclass(frozen=True, repr=False)
class Numeric(Domain):
    """A number.

    A number is described by its coordinate: the number itself, its logarithm, or the quantile of a normal distribution.
    Coordinates are uniform; `value_at` converts them to values.

    Attributes:
        lower: Smallest value; for a normal distribution, its mean.
        upper: Largest value, inclusive; for a normal distribution, its standard deviation.
        scale: Distribution of the values.
        is_int: Whether the values are ints.
        step: Values are multiples of it; 0: any values.
    """

    lower: float
    upper: float
    scale: Literal["linear", "log", "normal"]
    is_int: bool
    step: float
    call: tuple[str, tuple[Any, ...]]

    def examples(self) -> Sequence[Any]:
        """Return both ends and a value between them: the ends of a range of floats may be ints or bools."""
        between = self.lower + _GOLDEN * (self.upper - self.lower)
        return [] if self.scale == "normal" else list(map(self.clip, (self.lower, between, self.upper)))

    def coordinate_of(self, value: float) -> float:
        """Return the coordinate of a value."""
        return value if self.scale != "normal" else statistics.NormalDist(self.lower, self.upper).cdf(value)

    def value_at(self, coordinate: float) -> Any:
        """Return the value of a coordinate: of a quantile in (0, 1) if `scale` is "normal", else the nearest value."""
        if self.scale == "normal":
            quantile = min(max(coordinate, 1e-12), 1 - 1e-12)
            coordinate = self.lower + self.upper * _NORMAL.inv_cdf(quantile)
        return self.clip(coordinate)

    def clip(self, value: float) -> Any:
        """Return the allowed value nearest to `value`. A normal distribution allows any multiple of its step."""
        if self.step:
            value = round(value / self.step) * self.step
        if self.scale != "normal":
            value = min(max(value, self.lower), self.upper)
        return round(value) if self.is_int else float(value)


@dataclasses.dataclass(frozen=True, repr=False)
class Function(Domain):
    """A value computed by a function, from the trial's other values if it takes an argument."""

    function: Callable[..., Any]
    call: tuple[str, tuple[Any, ...]]

    def value_of(self, spec: object) -> Any:
        """Return the function's value.

        Args:
            spec: Passed to a function with a parameter; ``spec.config`` has the trial's other values.
        """
        try:
            takes_spec = bool(inspect.signature(self.function).parameters)
        except ValueError:  # a built-in function without a signature
            takes_spec = False
        return self.function(spec) if takes_spec else self.function()


# The functions return Any, so that type checkers accept their results in place of any setting's value.


def grid_search(values: Sequence[Any]) -> Any:
    """Return a search object for all of these values. Every grid point gets ``num_samples`` trials.

    Raises:
        ConfigurationError: There are no values.
    """
    return GridSearch(_some("grid_search", values), ("grid_search", (list(values),)))


def choice(categories: Sequence[Any]) -> Any:
    """Return a search object for one of these values.

    Raises:
        ConfigurationError: There are no values.
    """
    return Categorical(_some("choice", categories), ("choice", (list(categories),)))


def uniform(lower: float, upper: float) -> Any:
    """Return a search object for a float in [lower, upper]."""
    return _number("uniform", lower, upper)


def quniform(lower: float, upper: float, q: float) -> Any:
    """Return a search object for a multiple of `q` in [lower, upper]; both must be multiples of it."""
    return _number("quniform", lower, upper, q=q)


def loguniform(lower: float, upper: float) -> Any:
    """Return a search object for a float in [lower, upper] whose logarithm is uniform."""
    return _number("loguniform", lower, upper, scale="log")


def qloguniform(lower: float, upper: float, q: float) -> Any:
    """Return a search object like `loguniform`, rounded to multiples of `q`."""
    return _number("qloguniform", lower, upper, scale="log", q=q)


def randint(lower: int, upper: int) -> Any:
    """Return a search object for an int from `lower` to `upper` - 1."""
    return _number("randint", lower, upper, is_int=True, is_open=True)


def qrandint(lower: int, upper: int, q: int = 1) -> Any:
    """Return a search object for a multiple of `q` in [lower, upper]; with q=1 `upper` is excluded, as in RLlib."""
    return _number("qrandint", lower, upper, is_int=True, q=q, is_open=q == 1)


def lograndint(lower: int, upper: int) -> Any:
    """Return a search object for an int from `lower` to `upper` - 1 whose logarithm is uniform."""
    return _number("lograndint", lower, upper, scale="log", is_int=True, is_open=True)


def qlograndint(lower: int, upper: int, q: int) -> Any:
    """Return a search object like `lograndint`, rounded to multiples of `q`; `upper` is included."""
    return _number("qlograndint", lower, upper, scale="log", is_int=True, q=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Any:
    """Return a search object for a normally distributed float."""
    return _normal("randn", mean, sd, ())


def qrandn(mean: float, sd: float, q: float) -> Any:
    """Return a search object for a normally distributed float, rounded to multiples of `q`."""
    return _normal("qrandn", mean, sd, (q,))


def sample_from(function: Callable[..., Any]) -> Any:
    """Return a search object for the value of a function.

    Args:
        function: Called once per trial: ``function()`` or ``function(spec)``. ``spec.config`` has the trial's other
            values, e.g. ``sample_from(lambda spec: spec.config.lr / 10)``. Random numbers of `random` and
            `numpy.random` are seeded for each trial.

    Raises:
        ConfigurationError: `function` is not callable.
    """
    if not callable(function):
        raise ConfigurationError(f"sample_from({function!r}): expected a function, e.g. lambda spec: ….")
    return Function(function, ("sample_from", (function,)))


SEARCH_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for name, function in list(globals().items())
    if name in __all__ and inspect.isfunction(function)
}
"""The functions that create search objects, by name."""


def search_object_from_plain(plain: object) -> Any:
    """Return the search object of ``{function: [arguments]}``.

    Raises:
        ConfigurationError: There is no such function, or the arguments are invalid.
    """
    if not isinstance(plain, Mapping) or len(plain) != 1:
        raise ConfigurationError(f"expected one search function with its arguments, got {plain!r}.")
    ((name, arguments),) = plain.items()
    if name not in SEARCH_FUNCTIONS:
        raise ConfigurationError(f"No search function {name!r}.{did_you_mean(name, SEARCH_FUNCTIONS)}")
    try:
        return SEARCH_FUNCTIONS[name](*arguments)
    except TypeError as error:
        raise ConfigurationError(f"{name} = {arguments!r}: {error}.") from None


def search_objects_in_tables(data: object) -> Any:
    """Return parsed TOML with ``{loguniform = [1e-5, 1e-2]}`` replaced by the search object.

    ``{grid_search = [a, b]}`` and ``{choice = [a, b]}`` list the values directly.

    Raises:
        ConfigurationError: The arguments are invalid.
    """
    if isinstance(data, list):
        return [search_objects_in_tables(item) for item in data]
    if not isinstance(data, dict):
        return data
    name = next(iter(data), "")
    if len(data) == 1 and name in SEARCH_FUNCTIONS and isinstance(data[name], list):
        arguments = [search_objects_in_tables(item) for item in data[name]]
        return search_object_from_plain(
            {name: [arguments] if name in ("grid_search", "choice") else arguments}
        )
    return {key: search_objects_in_tables(item) for key, item in data.items()}


# -- search objects inside other values --------------------------------------------------------------------


def find_search_objects(value: object) -> dict[str, SearchObject]:
    """Return the search objects inside a value by path, e.g. ``{"lr": …, "env_config/size": …}``."""
    found: dict[str, SearchObject] = {}

    def note(path: str, item: object) -> object:
        if isinstance(item, SearchObject):
            found[path] = item
        return item

    _map(value, "", note)
    return found


def replace_values(value: object, values: Mapping[str, Any]) -> Any:
    """Return a copy of `value` with what is at these paths replaced, e.g. its search objects.

    Args:
        value: A config, dict or any other value.
        values: The replacement for each path.

    Raises:
        ConfigurationError: A replacement is invalid for its setting, or a path leads to nothing that can be replaced.
    """
    missing = dict(values)

    def replace(path: str, item: object) -> object:
        return missing.pop(path) if path in missing else item

    replaced = _map(value, "", replace)
    if missing:
        raise ConfigurationError(
            f"config: no value can be set at {next(iter(missing))!r}: expected a setting, or what a dict, list, tuple, "
            "dataclass or functools.partial in one holds. Put the value there in param_space."
        )
    return replaced


def _map(value: Any, path: str, replace: Callable[[str, object], Any]) -> Any:
    """Return `value` with ``replace(path, item)`` in place of each item, at every depth; share what is unchanged."""
    new = replace(path, value)
    if new is not value or isinstance(value, SearchObject):
        return new
    if value is None or isinstance(value, str | bytes | int | float | type | np.ndarray):
        return value
    tag = getattr(value, "plain_tag", None)
    if tag is not None and hasattr(value, "update_from_dict"):  # `value` is a config
        changed = _changed(value.to_dict(), path, replace)
        return value.copy(copy_frozen=False).update_from_dict(changed) if changed else value
    if isinstance(value, dict):
        changed = _changed(value, path, replace)
        return {**value, **changed} if changed else value
    if type(value) in (list, tuple):
        changed = _changed(dict(enumerate(value)), path, replace)
        return type(value)(changed.get(i, item) for i, item in enumerate(value)) if changed else value
    if isinstance(value, functools.partial):
        arguments = _map(value.args, path, replace), _map(value.keywords, path, replace)
        if arguments[0] is value.args and arguments[1] is value.keywords:
            return value
        return functools.partial(value.func, *arguments[0], **arguments[1])
    if tag is not None or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        attributes = {field.name: getattr(value, field.name) for field in fields} or vars(value)
        changed = _changed(attributes, path, replace)
        if not changed:
            return value
        if tag is None or not hasattr(value, "__dict__"):
            return dataclasses.replace(value, **changed)
        new = copy.copy(value)
        vars(new).update(changed)
        return new
    return value


def _changed(items: Mapping[Any, Any], path: str, replace: Callable[[str, object], Any]) -> dict[Any, Any]:
    changed = {}
    for key, item in items.items():
        new = _map(item, f"{path}/{key}" if path else str(key), replace)
        if new is not item:
            changed[key] = new
    return changed


# -- checks --------------------------------------------------------------------------------------------------


def _some(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigurationError(f"{name}({values!r}): expected a list of at least one value.")
    return tuple(values)


def _number(
    name: str,
    lower: float,
    upper: float,
    *,
    scale: Literal["linear", "log"] = "linear",
    is_int: bool = False,
    q: float | None = None,
    is_open: bool = False,
) -> Numeric:
    lower, upper = (int(end) if isinstance(end, bool) else end for end in (lower, upper))
    arguments = (lower, upper) if q is None else (lower, upper, q)
    text = f"{name}({', '.join(map(repr, arguments))})"
    for number in arguments:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ConfigurationError(f"{text}: expected finite numbers, got {number!r}.")
        if is_int and number != int(number):
            raise ConfigurationError(f"{text}: expected ints, got {number!r}.")
    if scale == "log" and lower <= 0:
        raise ConfigurationError(f"{text}: a logarithm needs lower > 0, got {lower!r}.")
    if not lower < upper:
        raise ConfigurationError(f"{text}: expected lower < upper.")
    if q is not None and q <= 0:
        raise ConfigurationError(f"{text}: expected q > 0.")
    if q is not None and any(abs(end / q - round(end / q)) > 1e-9 for end in (lower, upper)):
        raise ConfigurationError(f"{text}: lower and upper must be multiples of q.")
    last = upper - 1 if is_open else upper
    return Numeric(lower, last, scale, is_int, q or (1 if is_int else 0), (name, arguments))


def _normal(name: str, mean: float, sd: float, q: tuple[float, ...]) -> Numeric:
    if not sd > 0 or not all(step > 0 for step in q):
        raise ConfigurationError(f"{name}{(mean, sd, *q)!r}: expected sd > 0" + (" and q > 0." if q else "."))
    return Numeric(mean, sd, "normal", False, q[0] if q else 0, (name, (mean, sd, *q)))
