"""MetricsLogger: values logged under nested keys, reduced once per iteration, and merged across processes.

`StageTimers` are the mean durations of the stages of sampling and training, with the stages' names in results.
"""

from __future__ import annotations

import abc
import functools
import math
import numbers
import operator
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from rlzmq.core import trace
from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.core.synonyms import did_you_mean

__all__ = [
    "ENV_RESET_TIMER",
    "ENV_STEP_TIMER",
    "ENV_TO_MODULE_TIMER",
    "FRAGMENT_DELIVERY_TIMER",
    "FRAGMENT_ENCODE_TIMER",
    "INFERENCE_TIMER",
    "LEARNER_STAGES",
    "MODULE_TO_ENV_TIMER",
    "NUM_VECTOR_STEPS_PER_SAMPLE",
    "VECTOR_STEPS_TIMER",
    "WEIGHTS_WAIT_TIMER",
    "MetricsLogger",
    "ReducedMetrics",
    "StageTimers",
    "Stat",
    "StatsBase",
    "check_stats_cls_lookup",
    "logged_state",
]


REDUCTIONS = ("mean", "ema", "min", "max", "sum", "lifetime_sum", "percentiles", "item", "item_series")
# How a value becomes one with the next; a mean divides the sum.
_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("mean", "sum", "lifetime_sum"), operator.add),
    "min": lambda old, new: new if new < old else old,
    "max": lambda old, new: new if new > old else old,
    "item": lambda old, new: new,
}
_TAKES_ANYTHING = ("item", "item_series")
_PERCENTILES = (0, 50, 75, 90, 95, 99, 100)
_MAX_SERIES = 100_000  # limit for series that are never reduced


class StatsBase(abc.ABC):
    """Base class of custom reductions, for ``metrics_logger.log_value(key, value, reduce="name")``.

    Passed to a run with ``config.reporting(custom_stats_cls_lookup={"name": TheClass})``. Each process logs into its
    own object. After each fragment, the runners' objects are merged into the algorithm's. Only states are sent between
    processes: plain values (numbers, strings, bytes, lists, tuples, dicts, numpy arrays).

    A subclass defines `push`, `peek`, `merge`, `get_state`, `set_state`, and `clear` or `reduce`. Its constructor
    receives those of ``window``, ``ema_coeff`` and ``percentiles`` that were passed to `log_value`, as keyword
    arguments.

    Example:
        >>> class GeometricMean(StatsBase):
        ...     def __init__(self):
        ...         self.clear()
        ...
        ...     def clear(self):
        ...         self.log_sum, self.count = 0.0, 0
        ...
        ...     def push(self, value):
        ...         self.log_sum += math.log(value)
        ...         self.count += 1
        ...
        ...     def peek(self):
        ...         return math.exp(self.log_sum / self.count) if self.count else math.nan
        ...
        ...     def merge(self, incoming_stats):
        ...         for other in incoming_stats:
        ...             self.log_sum += other.log_sum
        ...             self.count += other.count
        ...
        ...     def get_state(self):
        ...         return {"log_sum": self.log_sum, "count": self.count}
        ...
        ...     def set_state(self, state):
        ...         self.log_sum, self.count = state["log_sum"], state["count"]
    """

    with_throughput: bool = False
    throughput: float = 0.0
    _logged_as: tuple[str, dict[str, Any]]  # the reduction's name, and the constructor's arguments

    @abc.abstractmethod
    def push(self, value: object) -> None:
        """Add a value."""

    @abc.abstractmethod
    def peek(self) -> Any:
        """Return the current reduced value without resetting it."""

    @abc.abstractmethod
    def merge(self, incoming_stats: Sequence[Self]) -> None:
        """Merge other objects of this class."""

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Return plain values from which `set_state` creates an equal object."""

    @abc.abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_state`."""

    def clear(self) -> None:  # noqa: B027
        """Remove the values. By default they are kept; `get_delta` must then be overridden, too."""

    def reduce(self) -> Any:
        """Return the value of the iteration and start the next one. By default, call `peek`, then `clear`."""
        value = self.peek()
        self.clear()
        return value

    def get_delta(self) -> dict[str, Any]:
        """Return the state of the values pushed since the last `reduce`, to be merged elsewhere.

        By default, return `get_state`, which is correct if `reduce` removes all values.
        """
        return self.get_state()


def check_stats_cls_lookup(lookup: Mapping[str, Any] | None) -> dict[str, type[StatsBase]]:
    """Return the lookup as a dict.

    Raises:
        TypeError: A name is not a str, or a value is not a usable subclass of StatsBase.
    """
    for name, cls in (lookup or {}).items():
        if not isinstance(name, str) or not (isinstance(cls, type) and issubclass(cls, StatsBase)):
            raise TypeError(
                f"custom_stats_cls_lookup: expected names with subclasses of rlzmq.StatsBase, got "
                f"{name!r}: {cls!r}."
            )
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise TypeError(
                f"custom_stats_cls_lookup[{name!r}]: {cls.__name__} does not define {', '.join(missing)}."
            )
    return dict(lookup or {})


class Stat(StatsBase):
    """A metric of a built-in reduction: the values since the last reduce.

    Args:
        reduce: One of `REDUCTIONS`. "lifetime_sum" never restarts; "item" keeps the newest value; "item_series" keeps
            all values; the others restart at each reduce unless `window` is set.
        window: Reduce over the newest `window` values, across reduces.
        ema_coeff: Weight of a new value in "ema" (default 0.01).
        with_throughput: Also report the sum of new values per second between reduces.
        percentiles: Percentiles for "percentiles", each from 0 to 100 (default: 0, 50, 75, 90, 95, 99, 100).
        clears_window: Whether each reduce drops the values of the window.

    Raises:
        ValueError: An option has no such value, or does not go with this reduction.
    """

    def __init__(
        self,
        reduce: str = "mean",
        window: int | None = None,
        ema_coeff: float | None = None,
        with_throughput: bool = False,
        percentiles: Sequence[float] | None = None,
        clears_window: bool = False,
    ) -> None:
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} is not known.{did_you_mean(reduce, REDUCTIONS)}")
        if ema_coeff is not None and reduce != "ema":
            raise ValueError(f"ema_coeff={ema_coeff!r} needs reduce='ema', got reduce={reduce!r}.")
        if window is not None and reduce == "ema":
            raise ValueError(f"window={window!r}: an 'ema' has no window, use reduce='mean' for one.")
        if window is not None and window < 1:
            raise ValueError(f"window: expected an int ≥ 1 or None, got {window!r}.")
        if percentiles is not None and not all(0 <= percentile <= 100 for percentile in percentiles):
            raise ValueError(f"percentiles: expected numbers from 0 to 100, got {percentiles!r}.")
        self.kind = reduce
        self.window = window
        self.percentiles: list[float] | None = None if percentiles is None else list(percentiles)
        self.ema_coeff: float = 0.01 if ema_coeff is None else ema_coeff
        self.with_throughput = with_throughput
        self.clears_window = clears_window
        keeps_all = reduce in ("percentiles", "item_series") or window is not None
        self.values: deque[Any] | None = deque(maxlen=window or _MAX_SERIES) if keeps_all else None
        self.total: Any = None  # of what was logged, by `_FOLDS`; the value of "ema"
        self.count: int = 0
        self.finished_count: int = 0  # the parts of `count` and `total` before the last reduce
        self.finished_total: Any = None
        self.since_finish: Any = 0  # sum of new values, for the throughput
        self.last_time: float = time.perf_counter()
        self.throughput: float = 0.0

    def push(self, value: object) -> None:
        """Add a value."""
        if self.values is not None:
            self.values.append(value)
        elif self.total is None:
            self.total = value
        elif self.kind == "ema":
            self.total = self.total + self.ema_coeff * (value - self.total)
        else:
            self.total = _FOLDS[self.kind](self.total, value)
        if self.with_throughput:
            self.since_finish = self.since_finish + value
        self.count += 1

    def peek(self) -> Any:
        """Return the current reduced value; NaN (or 0, or []) if nothing was logged."""
        if self.values is not None:
            return _plain(_reduce_values(self.kind, _plain(list(self.values)), self.percentiles))
        if self.total is None:
            return _of_nothing(self.kind)
        return _plain(self.total / self.count if self.kind == "mean" else self.total)

    def reduce(self) -> Any:
        """Return the value of the iteration, and drop values that are not kept."""
        value = self.peek()
        if self.with_throughput:
            now = time.perf_counter()
            self.throughput = float(self.since_finish) / max(now - self.last_time, 1e-9)
            self.last_time = now
            self.since_finish = 0
        if self.values is not None:
            if self.window is None or self.clears_window:
                self.values.clear()
        elif self.kind not in ("lifetime_sum", "item", "ema"):
            self.total, self.count = None, 0
        self.finished_count, self.finished_total = self.count, self.total
        return value

    def merge(self, incoming_stats: Sequence[Self]) -> None:
        """Merge what the same metric got since the last reduce in parallel processes."""
        others = [other for other in incoming_stats if other.count]
        if not others:
            return
        num_new = sum(other.count for other in others)
        self.count += num_new
        for other in others:
            self.since_finish = self.since_finish + other.since_finish
        if self.values is not None:
            for other in others:
                self.values.extend(other.values or ())
        elif self.kind == "ema":
            new = sum(other.count * other.total for other in others) / num_new
            old = self.total
            self.total = new if old is None else new + self._ema_kept(num_new) * (old - new)
        else:
            for other in others:
                self.total = other.total if self.total is None else _FOLDS[self.kind](self.total, other.total)

    def _ema_kept(self, num_new: int) -> float:
        """Return the remaining weight of an "ema" after a number of new values."""
        return float((1 - self.ema_coeff) ** num_new)

    def get_state(self) -> dict[str, Any]:
        """Return plain values from which `set_state` creates an equal metric."""
        return {
            "values": None if self.values is None else _plain(list(self.values)),
            "total": _plain(self.total),
            "count": self.count,
            "finished_count": self.finished_count,
            "finished_total": _plain(self.finished_total),
            "since_finish": 0,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_state` or `get_delta`."""
        if self.values is not None:
            self.values.clear()
            self.values.extend(state["values"] or ())
        self.total, self.count = state["total"], state["count"]
        self.finished_count, self.finished_total = state["finished_count"], state["finished_total"]
        self.since_finish = state["since_finish"]

    def get_delta(self) -> dict[str, Any]:
        """Return the state of the values logged since the last `reduce`."""
        state = self.get_state()
        num_new = self.count - self.finished_count
        if self.values is not None:
            values = list(self.values)
            state["values"] = values[max(len(values) - num_new, 0) :]
        elif self.kind == "lifetime_sum" and self.finished_count:
            state["total"] -= state["finished_total"]
        elif self.kind == "ema" and self.finished_count and (kept := self._ema_kept(num_new)) < 1:
            state["total"] = (state["total"] - kept * state["finished_total"]) / (1 - kept)
        since = _plain(self.since_finish)
        return {**state, "count": num_new, "finished_count": 0, "finished_total": None, "since_finish": since}


def new_stat(
    reduce: str, lookup: Mapping[str, type[StatsBase]] | None = None, **options: object
) -> StatsBase:
    """Return an empty metric.

    Args:
        reduce: The name of a built-in reduction, or one in the lookup.
        lookup: Own classes by name.
        options: The constructor's arguments that were given.

    Raises:
        ValueError: There is no such reduction, or an option does not fit it.
        TypeError: The class in the lookup does not take an option.
    """
    cls = (lookup or {}).get(reduce)
    if cls is None:
        if reduce not in REDUCTIONS:
            raise ValueError(
                f"reduce={reduce!r} is not known.{did_you_mean(reduce, [*REDUCTIONS, *(lookup or ())])} Names of your "
                "own classes are set with config.reporting(custom_stats_cls_lookup=…)."
            )
        stat: StatsBase = Stat(reduce, **options)  # type: ignore[arg-type]
    else:
        try:
            stat = cls(**options)
        except TypeError as error:
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise TypeError(f"reduce={reduce!r}: {cls.__name__}({given}): {error}") from error
    stat._logged_as = reduce, options
    return stat


def described_state(stat: StatsBase, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of a metric with what `new_stat` needs, as plain values."""
    reduce, options = stat._logged_as
    if type(stat) is not Stat:
        name = type(stat).__name__
        try:
            state = to_plain(state, f"{name}'s state")
        except NotPlainError as error:
            raise TypeError(
                f"{error} States of custom stats are plain values, so that they can be sent."
            ) from None
    return {"reduce": reduce, "options": options, "state": state}


def logged_state(reduce: str, values: Iterable[Any], *, window: int | None = None) -> dict[str, Any]:
    """Return the state of a metric that logged these values since the last reduce, for merging."""
    stat = new_stat(reduce, window=window)
    for value in values:
        stat.push(value)
    return described_state(stat, stat.get_delta())


def as_pushed(value: Any) -> Any:
    """Return a logged value detached from its graph. GPU values are copied when they are reduced."""
    if hasattr(value, "detach"):
        value = value.detach()
        if value.device.type != "cpu":
            return value
    return _plain(value)


def _plain(value: Any) -> Any:
    """Convert one-element tensors and arrays (also in a list) to Python numbers, and larger tensors to arrays."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not (hasattr(value, "item") and hasattr(value, "shape")):
        return value
    if math.prod(value.shape) == 1:
        return value.item()
    return value.cpu().numpy() if hasattr(value, "detach") else value


def _reduce_values(kind: str, values: list[Any], percentiles: Sequence[float] | None) -> Any:
    if kind == "item_series":
        return values
    if kind == "percentiles":
        wanted = _PERCENTILES if percentiles is None else percentiles
        return dict(zip(wanted, np.percentile(values, wanted).tolist(), strict=True)) if values else {}
    if not values:
        return _of_nothing(kind)
    total = functools.reduce(_FOLDS[kind], values)
    return total / len(values) if kind == "mean" else total


def _of_nothing(kind: str) -> float:
    return 0 if kind in ("sum", "lifetime_sum") else math.nan


Key = str | Sequence[str]


class ReducedMetrics(dict[str, Any]):
    """Plain values from `MetricsLogger.reduce`, with `states` for merging them into another logger.

    Attributes:
        states: The result of ``reduce(compile=False)``; and ``[reduction, value]`` of each value that was `put`.
    """

    def __init__(self, values: Mapping[str, Any], states: dict[str, Any]) -> None:
        super().__init__(values)
        self.states = states

    def put(self, reduce: str, values: Mapping[str, Any], *where: str) -> None:
        """Add values at a path, with states that merge them with others.

        Args:
            reduce: A reduction without a window; for "sum", floats are averaged.
            values: By name, in nested dicts.
            where: The path.
        """
        place: dict[str, Any] = self
        for name in where:
            place = place.setdefault(name, {})
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.put(reduce, value, *where, name)
                continue
            place[name] = value
            kind = "mean" if reduce == "sum" and isinstance(value, float) else reduce
            self.states["/".join((*where, name))] = [kind, value]


class MetricsLogger:
    """Logs values under nested keys. `reduce` converts them to one nested result dict.

    The default reduction is the plain mean since the last `reduce`. RLlib's default is an exponential moving average;
    for that, set ``reduce="ema"``.

    Args:
        root: Ignored; for compatibility with RLlib.
        stats_cls_lookup: Names for ``reduce=…`` with your own classes (see `StatsBase`), which may replace built-in
            ones. The loggers of a run get ``config.custom_stats_cls_lookup``.

    Example:
        >>> logger = MetricsLogger()
        >>> logger.log_value(("agent_1", "bumps"), 3, reduce="sum")
        >>> logger.reduce()
        {'agent_1': {'bumps': 3}}
    """

    def __init__(
        self, root: bool = False, stats_cls_lookup: Mapping[str, type[StatsBase]] | None = None
    ) -> None:
        self._stats: dict[tuple[str, ...], StatsBase] = {}
        self._lookup = check_stats_cls_lookup(stats_cls_lookup)
        self._last_reduce = time.perf_counter()

    def log_value(
        self,
        key: Key,
        value: object,
        *,
        reduce: str | None = None,
        window: int | None = None,
        ema_coeff: float | None = None,
        percentiles: Sequence[float] | bool | None = None,
        clear_on_reduce: bool | None = None,
        with_throughput: bool = False,
        stats: Sequence[str] = (),
    ) -> None:
        """Log one value.

        Args:
            key: A name, or a tuple of names for a nested entry.
            value: A number, or an array or tensor with one element (for "item" and "item_series", anything). Results
                contain plain numbers.
            reduce: One of `REDUCTIONS`, or a name in the lookup. None: the reduction of the key's first value; for a
                new key "ema" if `ema_coeff` is given, else "mean".
            window: Number of newest values to reduce over; not for "ema".
            ema_coeff: Weight of a new value in "ema".
            percentiles: Percentiles for "percentiles", from 0 to 100, linearly interpolated between values.
            clear_on_reduce: True: the values of a window are dropped at each `reduce`. False: a "sum" becomes a
                "lifetime_sum". It has no other effect.
            with_throughput: Whether to also report ``<key>_throughput``: the sum of the values since the last
                `reduce`, per second.
            stats: Several reductions to log at once, e.g. ``("mean", "min", "max")``, each under ``<key>_<reduction>``.

        Raises:
            ValueError: There is no such reduction, an option does not fit it, or the key was logged with another
                reduction before.
            TypeError: The reduction needs a number, and the value is none.
        """
        path = _path(key)
        if ema_coeff is not None and reduce in (None, "mean") and not stats:  # RLlib's moving mean
            reduce = "ema"
        if clear_on_reduce is False and reduce == "sum":
            reduce = "lifetime_sum"
        percentiles = None if percentiles is None or isinstance(percentiles, bool) else list(percentiles)
        if stats:
            for name in stats:
                self.log_value((*path[:-1], f"{path[-1]}_{name}"), value, reduce=name, window=window)
            return
        stat = self._stats.get(path)
        if stat is None:
            self._check_path(path)
            options: dict[str, Any] = {"window": window, "ema_coeff": ema_coeff, "percentiles": percentiles}
            if reduce not in self._lookup:
                options |= {
                    "with_throughput": with_throughput or None,
                    "clears_window": clear_on_reduce or None,
                }
            given = {name: option for name, option in options.items() if option is not None}
            stat = new_stat(reduce or "mean", self._lookup, **given)
        elif reduce is not None and reduce != stat._logged_as[0]:
            raise ValueError(
                f"Metric {'/'.join(path)!r} was logged with reduce={stat._logged_as[0]!r} before, now with "
                f"{reduce!r}: use one reduction per key, or another key."
            )
        if type(value) not in (float, int):
            value = as_pushed(value)
            if type(stat) is not Stat:
                value = _plain(value)
            elif not (
                hasattr(value, "dtype") or isinstance(value, numbers.Number) or stat.kind in _TAKES_ANYTHING
            ):
                raise TypeError(
                    f"Metric {'/'.join(path)!r}: expected a number for reduce={stat.kind!r}, got {value!r}: log "
                    "what is not a number with reduce='item', a dict of numbers with log_dict()."
                )
        stat.push(value)
        self._stats[path] = stat  # after the checks: a refused value leaves no metric

    def log_dict(self, values: Mapping[str, Any], *, key: Key | None = None, **options: Any) -> None:
        """Log every leaf of a nested dict, below `key` if given."""
        prefix = () if key is None else _path(key)
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*prefix, name), **options)
            else:
                self.log_value((*prefix, name), value, **options)

    @contextmanager
    def log_time(self, key: Key, *, reduce: str | None = None, **options: Any) -> Iterator[None]:
        """Log the duration of the ``with`` block in seconds. Options are those of `log_value`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.log_value(key, time.perf_counter() - start, reduce=reduce, **options)

    def peek(self, key: Key | None = None, default: object = ..., *, throughput: bool = False) -> Any:
        """Return the current reduced value (or nested dict of values) without resetting it.

        Args:
            key: The entry; None: all entries.
            default: Returned if nothing was logged.
            throughput: Whether to return the last throughput instead, for entries logged with_throughput.

        Raises:
            KeyError: Nothing was logged under the key, and there is no default.
        """
        path = () if key is None else _path(key)
        stat = self._stats.get(path)
        if stat is not None:
            return stat.throughput if throughput else stat.peek()
        below = {p[len(path) :]: s for p, s in self._stats.items() if p[: len(path)] == path}
        if below or not path:
            return _nest({p: s.peek() for p, s in below.items()})
        if default is not ...:
            return default
        names = ["/".join(p) for p in self._stats]
        raise KeyError(f"No metric {'/'.join(path)!r}.{did_you_mean('/'.join(path), names)}")

    def reduce(self, *, compile: bool = True) -> dict[str, Any]:
        """Return the result of this iteration, and reset sums, means, ….

        Args:
            compile: True: return plain values (a `ReducedMetrics`); False: return plain states of the values logged
                since the last reduce. Another logger's `aggregate` accepts both.
        """
        reduced = self.compile()
        return reduced if compile else reduced.states

    def compile(self) -> ReducedMetrics:
        """Return ``reduce(compile=True)``."""
        states: dict[str, dict[str, Any]] = {}
        result: dict[tuple[str, ...], Any] = {}
        for path, stat in self._stats.items():
            states["/".join(path)] = described_state(stat, stat.get_delta())
            result[path] = stat.reduce()
            if stat.with_throughput:
                result[(*path[:-1], f"{path[-1]}_throughput")] = stat.throughput
        self._last_reduce = time.perf_counter()
        return ReducedMetrics(_nest(result), states)

    def aggregate(self, states: Sequence[Mapping[str, Any]], *, key: Key | None = None) -> None:
        """Merge results of other loggers' `reduce`, below `key` if given.

        Their values count as logged in parallel, which matters only for "ema": pass later results of the same logger
        to a later call. The results of `EnvRunner.get_metrics`, `Learner.update` and `LearnerGroup.update` are
        accepted, too. Of a learner's numbers, those of this update's steps are added, lifetime counters replaced, and
        all others averaged.

        Raises:
            ValueError: There are values without their states, e.g. in a copy of `reduce`'s result.
        """
        prefix = () if key is None else _path(key)
        incoming: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for state in states:
            for name, value in getattr(state, "states", state).items():
                if isinstance(value, list) and len(value) == 2:
                    value = logged_state(value[0], value[1:])
                if not isinstance(value, Mapping) or not {"reduce", "options", "state"} <= value.keys():
                    raise ValueError(
                        f"aggregate: expected what another logger's reduce() or reduce(compile=False) returned, "
                        f"got {type(value).__name__} {value!r} at {name!r}: a value alone cannot be merged."
                    )
                incoming.setdefault((*prefix, *name.split("/")), []).append(value)
        for path, values in incoming.items():
            others = [self._from_state(value) for value in values]
            stat = self._stats.get(path)
            if stat is None:
                self._check_path(path)
                reduce, options = others[0]._logged_as
                stat = self._stats[path] = new_stat(reduce, self._lookup, **options)
                if isinstance(stat, Stat):
                    stat.last_time = self._last_reduce  # the values are older than this call
            for other in others:
                if type(other) is not type(stat):
                    raise ValueError(
                        f"Metric {'/'.join(path)!r} has reduce={stat._logged_as[0]!r} here and "
                        f"reduce={other._logged_as[0]!r} elsewhere: use one per key."
                    )
            stat.merge(others)

    def delete(self, *key: str, key_error: bool = True) -> None:
        """Remove one metric, or all metrics below a key.

        Raises:
            KeyError: There is no such metric (unless `key_error` is False).
        """
        doomed = [path for path in self._stats if path[: len(key)] == key]
        if not doomed and key_error:
            raise KeyError(f"No metric {'/'.join(key)!r}.")
        for path in doomed:
            del self._stats[path]

    def get_state(self) -> dict[str, Any]:
        """Return plain values from which `set_state` restores every metric."""
        return {"/".join(p): described_state(stat, stat.get_state()) for p, stat in self._stats.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_state`."""
        self._stats = {tuple(name.split("/")): self._from_state(value) for name, value in state.items()}

    def reset(self) -> None:
        """Remove all metrics."""
        self._stats = {}

    def _from_state(self, described: Mapping[str, Any]) -> StatsBase:
        stat = new_stat(described["reduce"], self._lookup, **described["options"])
        stat.set_state(described["state"] if type(stat) is Stat else from_plain(described["state"]))
        return stat

    def __contains__(self, key: Key) -> bool:
        return _path(key) in self._stats

    def __len__(self) -> int:
        return len(self._stats)

    def _check_path(self, path: tuple[str, ...]) -> None:
        for other in self._stats:
            short = min(len(other), len(path))
            if other[:short] == path[:short]:
                raise ValueError(
                    f"Metric {'/'.join(path)!r} cannot stand beside {'/'.join(other)!r}: one name would be both a "
                    "value and a group."
                )


def _path(key: Key) -> tuple[str, ...]:
    path = tuple(key.split("/")) if isinstance(key, str) else tuple(str(part) for part in key)
    if not path or not all(path):
        raise ValueError(f"key: expected a name or a non-empty tuple of names, got {key!r}.")
    return path


def _nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        place = nested
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return nested


# Keys below `env_runners` in a result, with slashes between levels, with RLlib's names.
ENV_RESET_TIMER = "env_reset_timer"
ENV_STEP_TIMER = "env_step_timer"
INFERENCE_TIMER = "rlmodule_inference_timer"
ENV_TO_MODULE_TIMER = "env_to_module_connector/connector_pipeline_timer"
MODULE_TO_ENV_TIMER = "module_to_env_connector/connector_pipeline_timer"
NUM_VECTOR_STEPS_PER_SAMPLE = "num_vector_steps_per_sample"
VECTOR_STEPS_TIMER = "vector_steps_timer"
FRAGMENT_ENCODE_TIMER = "fragment_encode_timer"
FRAGMENT_DELIVERY_TIMER = "fragment_delivery_timer"
WEIGHTS_WAIT_TIMER = "weights_wait_timer"

_IN_TRACE = {
    ENV_RESET_TIMER: "env",
    ENV_STEP_TIMER: "env",
    INFERENCE_TIMER: "inference",
    ENV_TO_MODULE_TIMER: "connector",
    MODULE_TO_ENV_TIMER: "connector",
}

LEARNER_STAGES = ("learner_forward_timer", "learner_backward_timer", "learner_reduce_timer")
"""Stages of an update's seconds in a learner's results."""


class StageTimers(dict[str, list[float]]):
    """Sums by name: [number of calls, total]. Totals are seconds, or another quantity that is averaged per call.

    Sums of several runners, or of several fragments, are added: `take` them from one object and `merge` them into
    another.
    """

    def add(self, name: str, total: float, num_calls: int = 1) -> None:
        """Add a number of calls and their total time."""
        sums = self.setdefault(name, [0, 0])
        sums[0] += num_calls
        sums[1] += total

    def add_stage(self, name: str, begin_s: float, end_s: float) -> None:
        """Add one call between two times of ``time.perf_counter``, also to the trace."""
        self.add(name, end_s - begin_s)
        if trace.is_on:
            trace.span(_IN_TRACE[name], begin_s, end_s)

    def add_pieces(self, pipeline: Any, prefix: str = "") -> None:
        """Add the result of a connector pipeline's `take_piece_timers`, under ``<prefix>timers/connectors/<piece>``.

        Piece names have RLlib's form: ``NumpyToTensor`` becomes ``numpy_to_tensor``.
        """
        for piece, (num_calls, seconds) in pipeline.take_piece_timers().items():
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", piece).lower()
            self.add(f"{prefix}timers/connectors/{name}", seconds, int(num_calls))

    def take(self) -> dict[str, list[float]]:
        """Return all sums as plain values, and reset them."""
        sums = dict(self)
        self.clear()
        return sums

    def merge(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Add what another's `take` returned."""
        for name, (num_calls, total) in sums.items():
            self.add(name, total, int(num_calls))

    def reduce(self) -> dict[str, Any]:
        """Return means per call, nested by name, and reset the sums."""
        means = {}
        for name, (num_calls, total) in self.take().items():
            means[tuple(name.split("/"))] = total / num_calls if num_calls else 0.0
        return _nest(means)
