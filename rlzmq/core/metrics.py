"""MetricsLogger: values logged under nested keys, reduced once per iteration, merged across processes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlzmq.core.suggest import did_you_mean

__all__ = ["REDUCTIONS", "MetricsLogger", "ReducedMetrics", "Stat"]

REDUCTIONS = ("mean", "ema", "min", "max", "sum", "lifetime_sum", "percentiles", "item", "item_series")
_PERCENTILES = (0, 50, 75, 90, 95, 99, 100)
_MAX_SERIES = 100_000  # a series that nobody reduces must not grow for ever

Key = str | Sequence[str]


class Stat:
    """One metric: the values since the last reduce, and how they become one.

    Args:
        reduce: One of `REDUCTIONS`. "lifetime_sum" never restarts; "item" keeps the newest value;
            "item_series" all values; the others start anew at each reduce unless `window` is set.
        window: Reduce over the newest `window` values, across reduces.
        ema_coeff: Weight of a new value in "ema" (default 0.01).
        with_throughput: Also report the change per second between reduces.
    """

    def __init__(
        self,
        reduce: str = "mean",
        window: int | None = None,
        ema_coeff: float | None = None,
        with_throughput: bool = False,
    ) -> None:
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} is not known.{did_you_mean(reduce, REDUCTIONS)}")
        if window is not None and window < 1:
            raise ValueError(f"window: expected an int ≥ 1 or None, got {window!r}.")
        self.reduce = reduce
        self.window = window
        self.ema_coeff = 0.01 if ema_coeff is None else ema_coeff
        self.with_throughput = with_throughput
        keeps_all = reduce in ("percentiles", "item_series") or window is not None
        self.values: deque[Any] | None = deque(maxlen=window or _MAX_SERIES) if keeps_all else None
        self.total: Any = 0
        self.count = 0
        self.extreme: Any = None
        self.finished_count = 0  # how many of `count`, how much of `total` the last reduce had already
        self.finished_total: Any = 0
        self.last_total = 0.0
        self.last_time = time.perf_counter()
        self.throughput = 0.0

    def push(self, value: Any) -> None:
        """Take one more value."""
        self.count += 1
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
        """The reduced value as of now; NaN (or 0, or []) where nothing was logged."""
        kind = self.reduce
        if self.values is not None:
            return _reduce_values(kind, list(self.values))
        if kind in ("sum", "lifetime_sum"):
            return self.total
        if kind == "mean":
            return self.total / self.count if self.count else math.nan
        if kind == "item":
            return self.total if self.count else math.nan
        return math.nan if self.extreme is None else self.extreme

    def finish(self) -> None:
        """Begin the next iteration: forget what does not live on."""
        if self.with_throughput:
            now = time.perf_counter()
            self.throughput = (float(self.total) - self.last_total) / max(now - self.last_time, 1e-9)
            self.last_time = now
            self.last_total = float(self.total) if self.reduce == "lifetime_sum" else 0.0
        if self.values is not None:
            if self.window is None:
                self.values.clear()
        elif self.reduce not in ("lifetime_sum", "item", "ema"):
            self.total, self.count, self.extreme = 0, 0, None
        self.finished_count, self.finished_total = self.count, self.total

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in another process's `state()` of the same metric."""
        if self.values is not None:
            self.values.extend(state.get("values") or ())
            self.count += state["count"]
            return
        if not state["count"]:
            return
        kind = self.reduce
        if kind in ("mean", "sum", "lifetime_sum"):
            self.total = self.total + state["total"]
            self.count += state["count"]
        elif kind == "item":
            self.total, self.count = state["total"], state["count"]
        else:
            count = self.count
            self.push(state["extreme"])
            self.count = count + state["count"]

    def state(self) -> dict[str, Any]:
        """Plain values from which `from_state` makes an equal metric."""
        return {
            "reduce": self.reduce,
            "window": self.window,
            "ema_coeff": self.ema_coeff,
            "with_throughput": self.with_throughput,
            "values": None if self.values is None else list(self.values),
            "total": self.total,
            "count": self.count,
            "extreme": self.extreme,
            "finished_count": self.finished_count,
            "finished_total": self.finished_total,
        }

    def delta(self) -> dict[str, Any]:
        """`state()` of only what was logged since the last `finish`."""
        state = self.state()
        num_new = self.count - self.finished_count
        if self.values is not None:
            values = list(self.values)
            state["values"] = values[max(len(values) - num_new, 0) :]
        elif self.reduce == "lifetime_sum":
            state["total"] = self.total - self.finished_total
        return {**state, "count": num_new, "finished_count": 0, "finished_total": 0}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Stat:
        """The metric that `state` describes."""
        stat = cls(state["reduce"], state["window"], state["ema_coeff"], state["with_throughput"])
        if stat.values is not None:
            stat.values.extend(state["values"] or ())
        stat.total, stat.count, stat.extreme = state["total"], state["count"], state["extreme"]
        stat.finished_count, stat.finished_total = state["finished_count"], state["finished_total"]
        stat.last_total = float(stat.total) if stat.reduce == "lifetime_sum" else 0.0
        return stat


class ReducedMetrics(dict[str, Any]):
    """`MetricsLogger.reduce`'s plain values, and in `states` what another logger needs to merge them.

    Attributes:
        states: What ``reduce(compile=False)`` would have returned.
    """

    def __init__(self, values: Mapping[str, Any], states: dict[str, Any]) -> None:
        super().__init__(values)
        self.states = states


class MetricsLogger:
    """Logs values under nested keys; `reduce` turns them into one nested result dict.

    The default reduction is the plain mean since the last `reduce` (RLlib's default is an
    exponential moving average: ask for ``reduce="ema"``).

    Example:
        >>> logger = MetricsLogger()
        >>> logger.log_value(("agent_1", "bumps"), 3, reduce="sum")
        >>> logger.reduce()
        {'agent_1': {'bumps': 3}}
    """

    def __init__(self, root: bool = False) -> None:
        self._stats: dict[tuple[str, ...], Stat] = {}
        self._root = root

    def log_value(
        self,
        key: Key,
        value: Any,
        *,
        reduce: str | None = None,
        window: int | None = None,
        ema_coeff: float | None = None,
        with_throughput: bool = False,
        stats: Sequence[str] = (),
    ) -> None:
        """Log one value.

        Args:
            key: A name, or a tuple of names for a nested place.
            value: A number (or anything, for "item" and "item_series").
            reduce: One of `REDUCTIONS`; None: as logged first, or "mean".
            window: Reduce over the newest so many values.
            ema_coeff: Weight of a new value in "ema".
            with_throughput: Report ``<key>_throughput`` too (per second), for sums.
            stats: Log several reductions at once, e.g. ``("mean", "min", "max")``, each under
                ``<key>_<reduction>``.

        Raises:
            ValueError: The key was logged with another reduction before.
        """
        path = _path(key)
        if stats:
            for name in stats:
                self.log_value((*path[:-1], f"{path[-1]}_{name}"), value, reduce=name, window=window)
            return
        stat = self._stats.get(path)
        if stat is None:
            self._check_path(path)
            stat = self._stats[path] = Stat(reduce or "mean", window, ema_coeff, with_throughput)
        elif reduce is not None and reduce != stat.reduce:
            raise ValueError(
                f"Metric {'/'.join(path)!r} was logged with reduce={stat.reduce!r} before, now with {reduce!r}: "
                "use one reduction per key, or another key."
            )
        stat.push(value)

    def log_dict(self, values: Mapping[str, Any], *, key: Key | None = None, **options: Any) -> None:
        """Log every leaf of a nested dict, under `key` where given."""
        prefix = () if key is None else _path(key)
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*prefix, name), **options)
            else:
                self.log_value((*prefix, name), value, **options)

    @contextmanager
    def log_time(self, key: Key, *, reduce: str = "mean", window: int | None = None) -> Iterator[None]:
        """Log how many seconds the ``with`` block took."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.log_value(key, time.perf_counter() - start, reduce=reduce, window=window)

    def peek(self, key: Key | None = None, default: Any = ...) -> Any:
        """The reduced value (or nested dict of values) as of now, nothing forgotten.

        Raises:
            KeyError: Nothing was logged there and no default was given.
        """
        path = () if key is None else _path(key)
        stat = self._stats.get(path)
        if stat is not None:
            return stat.peek()
        below = {p[len(path) :]: s for p, s in self._stats.items() if p[: len(path)] == path}
        if below or not path:
            return _nest({p: s.peek() for p, s in below.items()})
        if default is not ...:
            return default
        names = ["/".join(p) for p in self._stats]
        raise KeyError(f"No metric {'/'.join(path)!r}.{did_you_mean('/'.join(path), names)}")

    def reduce(self, *, compile: bool = True) -> dict[str, Any]:
        """The result of this iteration; sums, means, … start anew.

        Args:
            compile: True: plain values (a `ReducedMetrics`); False: plain states of what was logged since
                the last reduce. `aggregate` of another logger takes either.
        """
        states = {"/".join(path): stat.delta() for path, stat in self._stats.items()}
        result: dict[tuple[str, ...], Any] = {}
        for path, stat in self._stats.items():
            result[path] = stat.peek()
            stat.finish()
            if stat.with_throughput:
                result[(*path[:-1], f"{path[-1]}_throughput")] = stat.throughput
        return ReducedMetrics(_nest(result), states) if compile else states

    def compile(self) -> dict[str, Any]:
        """The same as ``reduce(compile=True)``."""
        return self.reduce()

    def aggregate(self, states: Sequence[Mapping[str, Any]], *, key: Key | None = None) -> None:
        """Merge what other loggers' `reduce` returned, under `key` where given.

        Raises:
            ValueError: Values without what they were reduced from, such as a copy of `reduce`'s result.
        """
        prefix = () if key is None else _path(key)
        for state in states:
            for name, value in getattr(state, "states", state).items():
                if not isinstance(value, Mapping) or "finished_count" not in value:
                    raise ValueError(
                        f"aggregate: expected what another logger's reduce() or reduce(compile=False) returned, "
                        f"got {type(value).__name__} {value!r} at {name!r}: a value alone cannot be merged."
                    )
                path = (*prefix, *name.split("/"))
                if path in self._stats:
                    self._stats[path].merge(value)
                else:
                    self._check_path(path)
                    self._stats[path] = Stat.from_state(value)

    def delete(self, *key: str, key_error: bool = True) -> None:
        """Forget one metric, or all below a key.

        Raises:
            KeyError: There is none (unless `key_error` is False).
        """
        doomed = [path for path in self._stats if path[: len(key)] == key]
        if not doomed and key_error:
            raise KeyError(f"No metric {'/'.join(key)!r}.")
        for path in doomed:
            del self._stats[path]

    def get_state(self) -> dict[str, Any]:
        """Plain values from which `set_state` restores every metric."""
        return {"/".join(path): stat.state() for path, stat in self._stats.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` describes."""
        self._stats = {tuple(name.split("/")): Stat.from_state(value) for name, value in state.items()}

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


def _reduce_values(kind: str, values: list[Any]) -> Any:
    if kind == "item_series":
        return values
    if kind == "percentiles":
        ordered = sorted(values)
        return {p: ordered[round((len(ordered) - 1) * p / 100)] for p in _PERCENTILES} if ordered else {}
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
