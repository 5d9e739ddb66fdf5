"""Run: read access to a run directory: its facts, settings, results, and whether its driver still runs."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import platform
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.svg_curve import svg_curve

__all__ = ["RETURN_MEAN", "X_AXES", "Run", "find_runs"]

RETURN_MEAN = "env_runners/episode_return_mean"
X_AXES = {
    "steps": "num_env_steps_sampled_lifetime",
    "time": "time_total_s",
    "iterations": "training_iteration",
}
"""The x axis of a curve, and its key in a result."""

_TRAINED = "num_env_steps_trained_lifetime"  # the steps of an offline run, which samples none
_PLACES = (
    "record_dir",
    "trace",
)  # they lie in each run's own directory, so they always differ
_AWAY_S = 24 * 3600.0  # a run on another host may still be running if its files changed within this time


@dataclass(frozen=True)
class Run:
    """A run directory. Notebooks display it with its learning curve.

    Example::

        run = Run.open("runs/cartpole-1")
        steps, returns = run.curve()

    Attributes:
        path: The directory.
        facts: Content of ``run.json``.
    """

    path: Path
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Return the run in a directory.

        Raises:
            ConfigurationError: It is not a run directory.
        """
        path = Path(path)
        try:
            facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
            if not isinstance(facts, dict) or "command" not in facts:
                raise ValueError("run.json is not that of a run")
            (path / "metrics.jsonl").stat()
        except (OSError, ValueError) as error:
            what = "is not a run directory" if path.exists() else "does not exist"
            reason = f" ({error})" if path.exists() else ""
            raise ConfigurationError(
                f"{path} {what}{reason}: expected run.json and metrics.jsonl, as rlzmq train writes them."
            ) from None
        return cls(path, facts)

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, e.g. ``"PPO"``; "?" if unknown."""
        train = self.facts.get("train") or ["?"]
        return str(self.facts.get("algorithm") or train[0].upper())

    @property
    def env(self) -> str:
        """The environment; "?" if unknown."""
        return str(self.facts.get("env") or self.settings.get("env", "?"))

    @property
    def seed(self) -> int | None:
        """The run's seed."""
        return self.facts.get("seed")

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults, by name; {} if they contain code."""
        try:
            sections = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        found: dict[str, Any] = {}
        for section in sections.values():
            found |= {name: value for name, value in section.items() if name != "unset"}
            found |= dict.fromkeys(section.get("unset", ()))
        return {name: value for name, value in found.items() if name not in _PLACES}

    @functools.cached_property
    def results(self) -> list[dict[str, Any]]:
        """The results by iteration. Of a repeated iteration, the last result counts; torn lines are left out."""
        results: list[dict[str, Any]] = []
        with open(self.path / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    result = json.loads(line)
                    iteration = result["training_iteration"]
                except (ValueError, KeyError, TypeError):
                    continue
                while results and results[-1]["training_iteration"] >= iteration:
                    results.pop()
                results.append(result)
        return results

    def curve(
        self, y: str = RETURN_MEAN, x: str = "steps"
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return a metric over the run: x and y of each iteration that has it.

        Args:
            y: Path of the metric in a result, e.g. ``"learners/default_policy/entropy"``.
            x: ``"steps"``, ``"time"`` (seconds) or ``"iterations"``.

        Raises:
            ConfigurationError: There is no result yet, or none has such a value.
        """
        if x not in X_AXES:
            raise ConfigurationError(f"x={x!r}: expected one of {', '.join(X_AXES)}.")
        if not self.results:
            raise ConfigurationError(f"{self.path} has no results yet: its first iteration has not ended.")
        key = X_AXES[x]
        if x == "steps" and not self.results[-1].get(key):
            key = _TRAINED
        rows = [dict(numbers_in(result)) for result in self.results]
        points = [(row[key], row[y]) for row in rows if key in row and y in row]
        if not points:
            names = {name for row in rows for name in row}
            hint = did_you_mean(y, names)
            if y == RETURN_MEAN:
                hint = " No episode has ended yet."
            raise ConfigurationError(f"{self.path}: no result has a number {y!r}.{hint}")
        found = np.array(points, np.float64)
        return found[:, 0], found[:, 1]

    @property
    def changed_s(self) -> float:
        """When the newest result was written, in seconds since 1970."""
        return (self.path / "metrics.jsonl").stat().st_mtime

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(path.lstat().st_size for path in self.path.rglob("*") if not path.is_dir())

    @property
    def state(self) -> str:
        """``"running"``, ``"ended"``, or ``"on HOST"``: on another machine, and changed within a day."""
        host, pid = self.facts.get("host"), self.facts.get("pid")
        is_locked = self._is_locked()
        if host != platform.node():
            if is_locked:
                return "running"
            return f"on {host}" if time.time() - self.changed_s < _AWAY_S else "ended"
        # A forked child of an ended driver may still hold the lock.
        return "running" if is_locked is not False and _exists(pid) else "ended"

    def _is_locked(self) -> bool | None:
        """Return whether a RunDirectory holds the lock; None if the filesystem has no locks."""
        with open(self.path / "metrics.jsonl", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return None
        return False

    def _repr_html_(self) -> str:
        title = f"<b>{self.path.name}</b>: {self.algorithm} on {self.env}, {self.state}"
        try:
            steps, values = self.curve()
        except ConfigurationError as error:
            return f"{title}<br>{error}"
        return f"{title}<br>{svg_curve(steps, values, 'env steps', RETURN_MEAN)}"


def find_runs(directory: str | Path) -> list[Run]:
    """Return the runs in a directory and its subdirectories, newest last.

    Args:
        directory: A run directory, or a directory with runs at any depth.

    Raises:
        ConfigurationError: There is no such directory, or no run in it.
    """
    directory = Path(directory)
    runs = []
    for place in ("run.json", "*/run.json", "*/*/run.json"):
        for path in directory.glob(place):
            try:
                runs.append(Run.open(path.parent))
            except ConfigurationError:
                continue
    if not runs:
        why = "no run in" if directory.is_dir() else "no directory"
        raise ConfigurationError(f"{why} {directory}: name a run directory, or a directory of runs.")
    return sorted(runs, key=lambda run: (run.changed_s, run.path))


def numbers_in(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a result by path, e.g. ``("env_runners/episode_return_mean", 21.5)``."""
    for name, value in result.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, int | float | np.number) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def _exists(pid: object) -> bool:
    if not isinstance(pid, int):
        return True  # unknown
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
