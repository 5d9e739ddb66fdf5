"""Stat: the reduction of one metric's values; StatsBase: the base class for custom reductions."""

from __future__ import annotations

import abc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.core.suggest import did_you_mean

__all__ = [
    "REDUCTIONS",
    "CustomStat",
    "Stat",
    "StatsBase",
    "as_pushed",
    "check_stats_cls_lookup",
    "logged_state",
]

REDUCTIONS = ("mean", "ema", "min", "max", "sum", "lifetime_sum", "percentiles", "item", "item_series")
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

    @abc.abstractmethod
    def push(self, value: Any) -> None:
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


class Stat:
    """One metric: the values since the last reduce, and their reduction.

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

    count: int
    finished_count: int

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
        self.reduce = reduce
        self.window = window
        self.percentiles: list[float] | None = None if percentiles is None else list(percentiles)
        self.ema_coeff: float = 0.01 if ema_coeff is None else ema_coeff
        self.with_throughput = with_throughput
        self.clears_window = clears_window
        keeps_all = reduce in ("percentiles", "item_series") or window is not None
        self.values: deque[Any] | None = deque(maxlen=window or _MAX_SERIES) if keeps_all else None
        self.total: Any = 0
        self.count = 0
        self.extreme: Any = None
        self.finished_count = 0  # the parts of `count` and `total` before the last reduce
        self.finished_total: Any = 0  # value of "ema" at the last reduce
        self.since_finish: Any = 0  # sum of new values, for the throughput
        self.last_time: float = time.perf_counter()
        self.throughput: float = 0.0

    def push(self, value: Any) -> None:
        """Add a value."""
        self.count += 1
        if self.with_throughput:
            self.since_finish = self.since_finish + value
        if self.values is not None:
            self.values.append(value)
            return
        kind = self.reduce
        if kind in ("mean", "sum", "lifetime_sum"):
            self.total = self.total + value
        elif kind == "item":
            self.total = value
        elif kind == "ema":
            old = self.extreme
            self.extreme = value if old is None else old + self.ema_coeff * (value - old)
        elif self.extreme is None or (value < self.extreme if kind == "min" else value > self.extreme):
            self.extreme = value

    def peek(self) -> Any:
        """Return the current reduced value; NaN (or 0, or []) if nothing was logged."""
        return _plain(self._peek())

    def _peek(self) -> Any:
        kind = self.reduce
        if self.values is not None:
            return _reduce_values(kind, _plain(list(self.values)), self.percentiles)
        if kind in ("sum", "lifetime_sum"):
            return self.total
        if kind == "mean":
            return self.total / self.count if self.count else math.nan
        if kind == "item":
            return self.total if self.count else math.nan
        return math.nan if self.extreme is None else self.extreme

    def finish(self) -> Any:
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
        elif self.reduce not in ("lifetime_sum", "item", "ema"):
            self.total, self.count, self.extreme = 0, 0, None
        self.finished_count = self.count
        self.finished_total = self.extreme if self.reduce == "ema" else self.total
        return value

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Merge the `delta()` of the same metric in parallel processes."""
        states = [state for state in states if state["count"]]
        if not states:
            return
        num_new = sum(state["count"] for state in states)
        self.count += num_new
        for state in states:
            self.since_finish = self.since_finish + state.get("since_finish", 0)
        kind = self.reduce
        if self.values is not None:
            for state in states:
                self.values.extend(state.get("values") or ())
        elif kind in ("mean", "sum", "lifetime_sum"):
            for state in states:
                self.total = self.total + state["total"]
        elif kind == "item":
            self.total = states[-1]["total"]
        elif kind == "ema":
            new = sum(state["count"] * state["extreme"] for state in states) / num_new
            old = self.extreme
            self.extreme = new if old is None else new + self._ema_kept(num_new) * (old - new)
        else:
            values = [state["extreme"] for state in states]
            values += [] if self.extreme is None else [self.extreme]
            self.extreme = min(values) if kind == "min" else max(values)

    def _ema_kept(self, num_new: int) -> float:
        """Return the remaining weight of an "ema" after a number of new values."""
        return float((1 - self.ema_coeff) ** num_new)

    def state(self) -> dict[str, Any]:
        """Return plain values from which `from_state` creates an equal metric."""
        return {
            "reduce": self.reduce,
            "window": self.window,
            "ema_coeff": self.ema_coeff,
            "with_throughput": self.with_throughput,
            "values": None if self.values is None else _plain(list(self.values)),
            "total": _plain(self.total),
            "count": self.count,
            "extreme": _plain(self.extreme),
            "finished_count": self.finished_count,
            "finished_total": _plain(self.finished_total),
            "percentiles": self.percentiles,
            "clears_window": self.clears_window,
        }

    def delta(self) -> dict[str, Any]:
        """Return the `state()` of the values logged since the last `finish`."""
        state = self.state()
        num_new = self.count - self.finished_count
        if self.values is not None:
            values = list(self.values)
            state["values"] = values[max(len(values) - num_new, 0) :]
        elif self.reduce == "lifetime_sum":
            state["total"] -= state["finished_total"]
        elif self.reduce == "ema" and self.finished_count and (kept := self._ema_kept(num_new)) < 1:
            state["extreme"] = (state["extreme"] - kept * state["finished_total"]) / (1 - kept)
        return {
            **state,
            "count": num_new,
            "finished_count": 0,
            "finished_total": 0,
            "since_finish": _plain(self.since_finish),
        }

    @classmethod
    def like(cls, state: Mapping[str, Any]) -> Stat:
        """Create an empty metric with the settings in `state`."""
        return cls(
            state["reduce"],
            state["window"],
            state["ema_coeff"] if state["reduce"] == "ema" else None,
            state["with_throughput"],
            state.get("percentiles"),
            state.get("clears_window", False),
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Stat:
        """Create the metric of a `state`."""
        stat = cls.like(state)
        if stat.values is not None:
            stat.values.extend(state["values"] or ())
        stat.total, stat.count, stat.extreme = state["total"], state["count"], state["extreme"]
        stat.finished_count, stat.finished_total = state["finished_count"], state["finished_total"]
        return stat


def logged_state(reduce: str, values: Iterable[Any], *, window: int | None = None) -> dict[str, Any]:
    """Return the state of a metric that logged these values since the last reduce, for merging."""
    stat = Stat(reduce, window)
    for value in values:
        stat.push(value)
    return stat.delta()


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


class CustomStat:
    """One metric whose values a StatsBase reduces, with the interface of `Stat`."""

    with_throughput = False
    throughput: float = 0.0

    def __init__(self, reduce: str, cls: type[StatsBase], options: Mapping[str, Any]) -> None:
        self.reduce = reduce
        self.options: dict[str, Any] = dict(options)
        self._cls = cls
        try:
            self.stats: StatsBase = cls(**self.options)
        except TypeError as error:
            raise TypeError(
                f"reduce={reduce!r}: {cls.__name__}({_spelled(self.options)}): {error}"
            ) from error
        self.peek: Callable[[], Any] = self.stats.peek

    def push(self, value: Any) -> None:
        """Add a value."""
        self.stats.push(_plain(value))

    def finish(self) -> Any:
        """Return the value of the ending iteration."""
        return self.stats.reduce()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Merge the `delta()` of the same metric in parallel processes."""
        others = [self._cls(**self.options) for _ in states]
        for other, state in zip(others, states, strict=True):
            other.set_state(from_plain(state["state"]))
        self.stats.merge(others)

    def state(self) -> dict[str, Any]:
        """Return plain values from which `from_state` creates an equal metric."""
        return self._described(self.stats.get_state())

    def delta(self) -> dict[str, Any]:
        """Return the `state` of the values pushed since the last `finish`."""
        return self._described(self.stats.get_delta())

    def _described(self, state: Any) -> dict[str, Any]:
        name = type(self.stats).__name__
        try:
            return {
                "custom": self.reduce,
                "options": self.options,
                "state": to_plain(state, f"{name}'s state"),
            }
        except NotPlainError as error:
            raise TypeError(
                f"{error} States of custom stats are plain values, so that they can be sent."
            ) from None

    @classmethod
    def like(cls, state: Mapping[str, Any], lookup: Mapping[str, type[StatsBase]]) -> CustomStat:
        """Create an empty metric with the settings in `state`.

        Raises:
            ValueError: The lookup lacks its class.
        """
        name = state["custom"]
        if name not in lookup:
            raise ValueError(
                f"A metric was logged with reduce={name!r}, for which no class is known."
                f"{did_you_mean(name, list(lookup))} Set config.reporting(custom_stats_cls_lookup=…)."
            )
        return cls(name, lookup[name], state["options"])

    @classmethod
    def from_state(cls, state: Mapping[str, Any], lookup: Mapping[str, type[StatsBase]]) -> CustomStat:
        """Create the metric of a `state`.

        Raises:
            ValueError: See `like`.
        """
        stat = cls.like(state, lookup)
        stat.stats.set_state(from_plain(state["state"]))
        return stat


def _spelled(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _percentile(ordered: Sequence[Any], percentile: float) -> Any:
    """Interpolate linearly between the two adjacent values."""
    place = (len(ordered) - 1) * percentile / 100
    below = math.floor(place)
    value = ordered[below]
    return value if place == below else value + (place - below) * (ordered[below + 1] - value)


def _reduce_values(kind: str, values: list[Any], percentiles: Sequence[float] | None) -> Any:
    if kind == "item_series":
        return values
    if kind == "percentiles":
        ordered = sorted(values)
        wanted = _PERCENTILES if percentiles is None else percentiles
        return {p: _percentile(ordered, p) for p in wanted} if ordered else {}
    if not values:
        return 0 if kind in ("sum", "lifetime_sum") else math.nan
    if kind == "min":
        return min(values)
    if kind == "max":
        return max(values)
    if kind == "item":
        return values[-1]
    total = sum(values)
    return total if kind in ("sum", "lifetime_sum") else total / len(values)
