"""MetricsLogger: values logged under nested keys, reduced once per iteration, and merged across processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlzmq.core.metrics_stats import (
    REDUCTIONS,
    CustomStat,
    Stat,
    StatsBase,
    as_pushed,
    check_stats_cls_lookup,
    logged_state,
)
from rlzmq.core.names import ALL_MODULES
from rlzmq.core.suggest import did_you_mean

__all__ = ["METRICS_STATES", "REDUCTIONS", "MetricsLogger", "ReducedMetrics", "Stat", "StatsBase"]

Key = str | Sequence[str]

#: Key of the metrics' states in a learner's results, from which the metrics of all ranks are merged.
METRICS_STATES = "metrics_states"


class ReducedMetrics(dict[str, Any]):
    """Plain values from `MetricsLogger.reduce`, with `states` for merging them into another logger.

    Attributes:
        states: The result of ``reduce(compile=False)``.
    """

    def __init__(self, values: Mapping[str, Any], states: dict[str, Any]) -> None:
        super().__init__(values)
        self.states = states


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
        self._stats: dict[tuple[str, ...], Stat | CustomStat] = {}
        self._lookup = check_stats_cls_lookup(stats_cls_lookup)
        self._last_reduce = time.perf_counter()

    def log_value(
        self,
        key: Key,
        value: Any,
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
        """
        path = _path(key)
        if ema_coeff is not None and reduce is None and not stats:
            reduce = "ema"
        if clear_on_reduce is False and reduce == "sum":
            reduce = "lifetime_sum"
        if isinstance(percentiles, bool):
            percentiles = None
        if stats:
            for name in stats:
                self.log_value((*path[:-1], f"{path[-1]}_{name}"), value, reduce=name, window=window)
            return
        stat = self._stats.get(path)
        if stat is None:
            self._check_path(path)
            stat = self._stats[path] = self._new_stat(
                reduce or "mean", window, ema_coeff, with_throughput, percentiles, bool(clear_on_reduce)
            )
        elif reduce is not None and reduce != stat.reduce:
            raise ValueError(
                f"Metric {'/'.join(path)!r} was logged with reduce={stat.reduce!r} before, now with {reduce!r}: "
                "use one reduction per key, or another key."
            )
        stat.push(value if type(value) in (float, int) else as_pushed(value))

    def _new_stat(
        self,
        reduce: str,
        window: int | None,
        ema_coeff: float | None,
        with_throughput: bool,
        percentiles: Sequence[float] | None,
        clears_window: bool,
    ) -> Stat | CustomStat:
        if reduce in self._lookup:
            given = {"window": window, "ema_coeff": ema_coeff, "percentiles": percentiles}
            options = {name: value for name, value in given.items() if value is not None}
            return CustomStat(reduce, self._lookup[reduce], options)
        if reduce not in REDUCTIONS:
            names = [*REDUCTIONS, *self._lookup]
            raise ValueError(f"reduce={reduce!r} is not known.{did_you_mean(reduce, names)}")
        return Stat(reduce, window, ema_coeff, with_throughput, percentiles, clears_window)

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

    def peek(self, key: Key | None = None, default: Any = ..., *, throughput: bool = False) -> Any:
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
        states = {"/".join(path): stat.delta() for path, stat in self._stats.items()}
        result: dict[tuple[str, ...], Any] = {}
        for path, stat in self._stats.items():
            result[path] = stat.finish()
            if stat.with_throughput:
                result[(*path[:-1], f"{path[-1]}_throughput")] = stat.throughput
        self._last_reduce = time.perf_counter()
        return ReducedMetrics(_nest(result), states)

    def aggregate(self, states: Sequence[Mapping[str, Any]], *, key: Key | None = None) -> None:
        """Merge results of other loggers' `reduce`, below `key` if given.

        Their values count as logged in parallel, which matters only for "ema": pass later results of the same logger
        to a later call. The results of `EnvRunner.get_metrics`, `Learner.update` and `LearnerGroup.update` are
        accepted, too. Of a learner's numbers, counters (``num_…``) are added, lifetime counters replaced, and all
        others averaged.

        Raises:
            ValueError: There are values without their states, e.g. in a copy of `reduce`'s result.
        """
        prefix = () if key is None else _path(key)
        incoming: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for state in states:
            for name, value in _states_of(state).items():
                if not isinstance(value, Mapping) or not ({"finished_count", "custom"} & value.keys()):
                    raise ValueError(
                        f"aggregate: expected what another logger's reduce() or reduce(compile=False) returned, "
                        f"got {type(value).__name__} {value!r} at {name!r}: a value alone cannot be merged."
                    )
                incoming.setdefault((*prefix, *name.split("/")), []).append(value)
        for path, values in incoming.items():
            stat = self._stats.get(path)
            if stat is None:
                self._check_path(path)
                stat = self._stats[path] = self._like(values[0])
            for value in values:
                if isinstance(stat, CustomStat) != ("custom" in value):
                    raise ValueError(
                        f"Metric {'/'.join(path)!r} has reduce={stat.reduce!r} here and "
                        f"reduce={value.get('custom', value.get('reduce'))!r} elsewhere: use one per key."
                    )
            stat.merge(values)

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
        return {"/".join(path): stat.state() for path, stat in self._stats.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_state`."""
        self._stats = {tuple(name.split("/")): self._from_state(value) for name, value in state.items()}

    def reset(self) -> None:
        """Remove all metrics."""
        self._stats = {}

    def _like(self, state: Mapping[str, Any]) -> Stat | CustomStat:
        if "custom" in state:
            return CustomStat.like(state, self._lookup)
        stat = Stat.like(state)
        stat.last_time = self._last_reduce  # the values are older than this call
        return stat

    def _from_state(self, state: Mapping[str, Any]) -> Stat | CustomStat:
        return CustomStat.from_state(state, self._lookup) if "custom" in state else Stat.from_state(state)

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


def _states_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the states to merge from one input of `aggregate`."""
    if ALL_MODULES in given:
        return {"/".join(path): state for path, state in _states_of_results(given)}
    states: Mapping[str, Any] = getattr(given, "states", given)
    return states


def _states_of_results(
    results: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield (path, state) for a learner's results: its logged metrics and every other number."""
    own: Mapping[str, Any] = results.get(ALL_MODULES, {}).get(METRICS_STATES, {}) if not above else {}
    for name, state in own.items():
        yield tuple(name.split("/")), dict(state)
    for name, value in results.items():
        path = (*above, str(name))
        if name == METRICS_STATES or "/".join(path) in own:
            continue
        if isinstance(value, Mapping):
            inner = ((p, s) for p, s in _states_of_results(value, path) if "/".join(p) not in own)
            yield from inner
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, logged_state(_reduction_of(path[-1]), [value])


def _reduction_of(name: str) -> str:
    if name.endswith("_lifetime") or name == "weights_seq_no":
        return "item"
    return "sum" if name.startswith("num_") else "mean"


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
