"""MetricsTail: reads the numbers of a growing file of results."""

from __future__ import annotations

import json
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlzmq.telemetry.metric_paths import value_at
from rlzmq.telemetry.runs import RETURN_MEAN, X_AXES

__all__ = ["COLUMNS", "LinesTail", "MetricsTail"]

T = TypeVar("T")

COLUMNS = {
    "iterations": X_AXES["iterations"],
    "steps": X_AXES["steps"],
    "trained": "num_env_steps_trained_lifetime",
    "time": X_AXES["time"],
    "mean": RETURN_MEAN,
    "low": "env_runners/episode_return_min",
    "high": "env_runners/episode_return_max",
    "rate": "env_runners/num_env_steps_sampled_lifetime_throughput",
}
"""Column name -> path of its number in a result."""

# A path's first part ("" for a number at the top level) -> indices of columns, and the paths' last parts.
_GROUPS: dict[str, list[tuple[int, str]]] = {}
for _index, _path in enumerate(COLUMNS.values()):
    _parts = _path.rpartition("/")
    _GROUPS.setdefault(_parts[0], []).append((_index, _parts[2]))
_FIRST_ROWS = 1024
_SLICE_BYTES = 4 << 20


class LinesTail(ABC):
    """Reads the lines of a growing file.

    Args:
        path: The file. It may be missing, or be replaced while it is read. None: there is no file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    @abstractmethod
    def begin(self) -> None:
        """Discard what was read: the file was replaced."""

    @abstractmethod
    def add_lines(self, lines: Sequence[bytes]) -> None:
        """Process new complete lines."""

    def read(self) -> bool:
        """Read at most 4 MiB of new data; return whether there is more."""
        if self._path is None:
            return False
        try:
            with open(self._path, "rb") as file:
                facts = os.fstat(file.fileno())
                if self._inode is not None and (facts.st_ino != self._inode or facts.st_size < self._offset):
                    self._offset, self._rest = 0, b""
                    self.begin()
                self._inode = facts.st_ino
                if facts.st_size == self._offset:
                    return False
                file.seek(self._offset)
                data = file.read(_SLICE_BYTES)
        except OSError:  # the file does not exist yet, or was removed
            return False
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self.add_lines(lines)
        return self._offset < facts.st_size


class MetricsTail(LinesTail):
    """The numbers of a file with one result per line, as columns. A repeated iteration replaces the earlier one.

    `read` may run in another thread than the other methods.

    Attributes:
        num_read: A counter that rises whenever the numbers change.
        newest: The newest result; {} before the first.
        steps_by_lag: Number of trained env steps by policy lag, of all results. Iterations that were repeated after a
            return to a checkpoint count each time.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self.num_read: int = 0
        self._derived: dict[Callable[..., Any], tuple[int, Any]] = {}
        self.begin()

    def begin(self) -> None:
        with self._lock:
            self._rows = np.empty((_FIRST_ROWS, len(COLUMNS)))
            self._num_rows = 0
            self.newest: Mapping[str, Any] = {}
            self.steps_by_lag: list[int] = []
            self.num_read += 1

    @property
    def num_rows(self) -> int:
        """Number of results."""
        return self._num_rows

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns by name ``[N]``, with NaN where a result lacks the number. Do not modify them."""
        with self._lock:
            rows = self._rows[: self._num_rows]
            return {name: rows[:, index] for index, name in enumerate(COLUMNS)}

    def derived(self, function: Callable[[Mapping[str, NDArray[np.float64]]], T]) -> T:
        """Return `function` of the columns; it is recomputed only after they have changed."""
        num_read = self.num_read
        known = self._derived.get(function)
        if known is None or known[0] != num_read:
            known = self._derived[function] = (num_read, function(self.columns()))
        value: T = known[1]
        return value

    def add_lines(self, lines: Sequence[bytes]) -> None:
        rows: list[list[float]] = []
        for line in lines:
            try:
                result = json.loads(line)
                row = _row_of(result)
            except (ValueError, TypeError, AttributeError):  # a torn line
                continue
            if math.isnan(row[0]):
                continue
            while rows and rows[-1][0] >= row[0]:
                rows.pop()
            rows.append(row)
            self.newest = result
            self._add_lags(result)
        with self._lock:
            if rows:
                self._add(rows)
            self.num_read += 1

    def _add_lags(self, result: Mapping[str, Any]) -> None:
        counts = value_at(result, "policy_lag/num_env_steps")
        if isinstance(counts, list) and all(type(count) is int for count in counts):
            self.steps_by_lag = [
                known + new for known, new in zip_longest(self.steps_by_lag, counts, fillvalue=0)
            ]

    def _add(self, rows: Sequence[Sequence[float]]) -> None:
        count = self._num_rows
        if count and self._rows[count - 1, 0] >= rows[0][0]:
            count = int(np.searchsorted(self._rows[:count, 0], rows[0][0]))
            self._rows = self._rows.copy()  # readers keep the previous columns
        end = count + len(rows)
        if end > len(self._rows):
            more = np.empty((max(end, 2 * len(self._rows)), len(COLUMNS)))
            more[:count] = self._rows[:count]
            self._rows = more
        self._rows[count:end] = rows
        self._num_rows = end


def _row_of(result: Mapping[str, Any]) -> list[float]:
    row = [math.nan] * len(COLUMNS)
    for group, numbers in _GROUPS.items():
        values = result.get(group) or {} if group else result
        for index, name in numbers:
            if (value := values.get(name)) is not None:
                row[index] = float(value)
    return row
