"""Run: read access to a run directory: its facts, settings, results, and whether its driver still runs."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import platform
import textwrap
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.checkpoint import read_manifest
from rlzmq.core.errors import CheckpointError, ConfigurationError, printable
from rlzmq.core.imports import import_optional
from rlzmq.core.run_dir import RunDir, checkpoints_at
from rlzmq.core.score_statistics import bootstrap_interval, interquartile_mean, svg_curve
from rlzmq.core.synonyms import did_you_mean

__all__ = [
    "RETURN_MEAN",
    "X_AXES",
    "X_LABELS",
    "Curve",
    "FoundRun",
    "Mode",
    "Run",
    "check_mode",
    "check_no_search",
    "differing_settings",
    "find_run",
    "find_runs",
    "finite",
    "flatten",
    "group_by_settings",
    "iqm_curves",
    "mean_curve",
    "number_at",
    "plot_curves",
    "results_in",
    "score_at",
    "value_at",
]


RETURN_MEAN = "env_runners/episode_return_mean"
X_AXES = {
    "steps": "num_env_steps_sampled_lifetime",
    "time": "time_total_s",
    "iterations": "training_iteration",
}
"""The x axis of a curve, and its key in a result."""

_TRAINED = "num_env_steps_trained_lifetime"  # the steps of an offline run, which samples none
_PLACES = ("record_dir", "trace")  # in each run's own directory, so they always differ
_SEARCH = "tuner.json"  # in the directory of a search
_OF_A_RUN = ("run.json", "config.toml", "metrics.jsonl", _SEARCH)
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
        """The results by iteration; see `results_in`."""
        return results_in(self.path / "metrics.jsonl")

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
        rows = [(_number_in(result, key), _number_in(result, y)) for result in self.results]
        points = [(at, value) for at, value in rows if at is not None and value is not None]
        if not points:
            names = {name for result in self.results for name, _ in numbers_in(result)}
            hint = did_you_mean(y, names)
            if y == RETURN_MEAN:
                evaluated = f"evaluation/{RETURN_MEAN}"
                hint = f" It has {evaluated!r}." if evaluated in names else " No episode has ended yet."
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
        host = self.facts.get("host")
        is_known = host == platform.node()
        try:
            if RunDir(self.path).driver is not None:
                return "running"
        except OSError:  # the filesystem has no locks
            is_known = False
        return "ended" if is_known or time.time() - self.changed_s >= _AWAY_S else f"on {host}"

    def _repr_html_(self) -> str:
        title = f"<b>{self.path.name}</b>: {self.algorithm} on {self.env}, {self.state}"
        try:
            steps, values = self.curve()
        except ConfigurationError as error:
            return f"{title}<br>{error}"
        return f"{title}<br>{svg_curve(steps, values, 'env steps', RETURN_MEAN)}"


@dataclass(frozen=True)
class FoundRun:
    """What a run has left in a directory, however incomplete it is. Its text is for people.

    Attributes:
        path: The directory.
        algorithm, env: Of the run; "?" if unknown.
        iteration: Of its newest result or checkpoint; 0 if there is none.
        changed_s: When it was last written, in seconds since 1970.
    """

    path: Path
    algorithm: str
    env: str
    iteration: int
    changed_s: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed_s))
        count = f"{self.iteration} iteration{'s' * (self.iteration != 1)}"
        return printable(f"{self.algorithm} on {self.env}, {count}, last written {when}")


def find_run(path: Path) -> FoundRun | None:
    """Return the run whose settings, results or checkpoints are in a directory; None if nothing of a run is there."""
    files = [file for name in _OF_A_RUN if (file := path / name).exists()]
    checkpoints = checkpoints_at(path)
    if not files and not checkpoints:
        return None
    facts: Any = {}
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    run = Run(path, facts if isinstance(facts, dict) else {})
    algorithm, iteration = run.algorithm, _last_iteration(path)
    for checkpoint in checkpoints[:1]:
        with contextlib.suppress(CheckpointError, ValueError):
            about = read_manifest(checkpoint)["about"]
            algorithm = str(about.get("algorithm", "?")) if algorithm == "?" else algorithm
            iteration = int(about.get("iteration", 0)) if iteration is None else iteration
    changed_s = max(place.stat().st_mtime for place in (*files, *checkpoints))
    return FoundRun(path, algorithm, run.env, iteration or 0, changed_s)


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
        if (directory / _SEARCH).exists() or any(directory.glob(f"*/{_SEARCH}")):
            raise ConfigurationError(
                f"{directory} holds a search, whose trials are no run directories: rlzmq dashboard {directory} shows "
                "them."
            )
        raise ConfigurationError(f"{why} {directory}: name a run directory, or a directory of runs.")
    return sorted(runs, key=lambda run: (run.changed_s, run.path))


def check_no_search(place: Path) -> None:
    """Check that a directory, where a checkpoint is expected, is not that of a search or of a whole trial.

    Raises:
        ConfigurationError: It is; the text names the best of its checkpoints.
    """
    of = next((path for path in (place, place.absolute().parent) if (path / _SEARCH).is_file()), None)
    if of is None or (place / "manifest.json").exists():
        return
    metric: str = RETURN_MEAN
    mode: Mode = "max"
    saved: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        fields = json.loads((of / _SEARCH).read_text(encoding="utf-8"))["tune_config"]["fields"]
        metric, mode = fields["metric"]["value"] or metric, fields["mode"]["value"] or mode
    for file in place.glob("checkpoints.json" if of != place else "*/checkpoints.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            for each in json.loads(file.read_text(encoding="utf-8")):
                score = score_at(each["result"], metric, mode)
                saved.append((score, each["result"]["training_iteration"], file.with_name(each["name"])))
    what = "search" if of == place else "trial"
    best = f"Name one; the best by {metric} is {max(saved)[2]}." if saved else "It holds none."
    raise ConfigurationError(f"{place} is the directory of a {what}, expected a checkpoint. {best}")


def results_in(file: Path) -> list[dict[str, Any]]:
    """Return the results in a file with one per line; [] if it is missing.

    Of a repeated iteration, the last result counts; torn lines are left out.
    """
    results: list[dict[str, Any]] = []
    if not file.exists():
        return results
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                result = json.loads(line)
                iteration = result["training_iteration"]
            except (ValueError, KeyError, TypeError):
                continue
            while results and results[-1]["training_iteration"] >= iteration:
                results.pop()
            results.append(result)
    return results


def finite(content: object) -> object:
    """Return JSON values with NaN and infinity replaced by None, since JSON lacks them."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return content


def numbers_in(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a result by path, e.g. ``("env_runners/episode_return_mean", 21.5)``."""
    for path, value in flatten(result).items():
        if isinstance(value, int | float | np.number) and not isinstance(value, bool):
            yield path, float(value)


def _number_in(result: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a path, also of a name that contains a slash; None if the result has none there."""
    value = value_at(result, path)
    if value is None:
        value = flatten(result).get(path)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _last_iteration(path: Path) -> int | None:
    """Return the number of the last result in a run directory, or None."""
    last = None
    with contextlib.suppress(OSError), open(path / "metrics.jsonl", "rb") as file:
        for line in collections.deque(file, maxlen=2):  # a kill may have cut off the last one
            with contextlib.suppress(ValueError, KeyError, TypeError):
                last = int(json.loads(line)["training_iteration"])
    return last


_NUM_POINTS = 200
_LABEL_WIDTH = 80
"""Maximum number of characters per label in a plot's legend."""
X_LABELS = {"steps": "env steps", "time": "time (s)", "iterations": "iterations"}


@dataclass(frozen=True)
class Curve:
    """The mean and interval over several runs.

    Attributes:
        label: The settings that the runs share.
        x: ``[N]``, ascending.
        mean: ``[N]``: the mean, or the interquartile mean.
        low, high: The ends of the 95 % interval ``[N]``; NaN for a single run.
    """

    label: str
    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def group_by_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs grouped by algorithm, env and settings except the seed, by a label of the differing settings."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name != "seed"}
        groups.setdefault(json.dumps([run.algorithm, run.env, settings], sort_keys=True), []).append(run)
    firsts = [group[0] for group in groups.values()]
    labels: dict[str, list[Run]] = {}
    for group in groups.values():
        first = group[0]
        alike = [other for other in firsts if (other.algorithm, other.env) == (first.algorithm, first.env)]
        differing = [name for name in differing_settings(alike) if name not in ("seed", "env")]
        own = [f"{name}={first.settings.get(name, 'default')}" for name in differing]
        label = " ".join([first.algorithm, first.env, *own])
        labels.setdefault(label, []).extend(group)
    return labels


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the names of the settings whose values differ between the runs."""
    names = sorted({name for run in runs for name in run.settings})
    return [
        name
        for name in names
        if len({json.dumps(run.settings.get(name, "default"), sort_keys=True) for run in runs}) > 1
    ]


def mean_curve(label: str, runs: Sequence[Run], y: str, x: str) -> Curve:
    """Return the mean over runs, linearly interpolated at those x where all runs have values.

    Raises:
        ConfigurationError: A run has no such values, or the runs have no common range of x.
    """
    if len(runs) == 1:
        xs, ys = runs[0].curve(y, x)
        nothing = np.full(len(xs), np.nan)
        return Curve(label, xs, ys, nothing, nothing)
    grid, values = _in_common(label, runs, y, x)
    low, high = bootstrap_interval(values)
    return Curve(label, grid, values.mean(axis=0), low, high)


def iqm_curves(groups: Mapping[str, Sequence[Run]], y: str, x: str) -> list[Curve]:
    """Return each group's interquartile mean over its runs in all envs, with intervals stratified by env.

    Values are normalised per env: 0 is the mean of all groups' runs in this env at the beginning, 1 the best run's
    value at the end. With several envs, the x axis is the fraction of what all runs in an env have.

    Source: Agarwal et al. 2021 (see `rlzmq.core.score_statistics`), figure "sample efficiency".

    Raises:
        ConfigurationError: A group lacks an env that another has, or see `mean_curve`.
    """
    envs = sorted({run.env for runs in groups.values() for run in runs})
    scores: dict[str, list[NDArray[np.float64]]] = {label: [] for label in groups}
    grid = np.linspace(0, 1, _NUM_POINTS)
    for env in envs:
        of_env = [(label, run) for label, runs in groups.items() for run in runs if run.env == env]
        if lacking := set(groups) - {label for label, _ in of_env}:
            raise ConfigurationError(
                f"{min(lacking)} has no run in {env}: each group needs runs in all envs ({', '.join(envs)})."
            )
        steps, values = _in_common(env, [run for _, run in of_env], y, x)
        values = values - values[:, 0].mean()
        best = values[:, -1].max()
        for (label, _), row in zip(of_env, values / (best if best > 0 else 1.0), strict=True):
            scores[label].append(row)
        grid = steps if len(envs) == 1 else grid
    curves = []
    for label, runs in groups.items():
        rows = np.stack(scores[label])
        strata = sorted(run.env for run in runs)  # the order of `rows`
        low, high = bootstrap_interval(rows, interquartile_mean, strata=strata)
        curves.append(Curve(label, grid, interquartile_mean(rows), low, high))
    return curves


def _in_common(
    label: str, runs: Sequence[Run], y: str, x: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a grid over those x where all runs have values, and their values there, one row each."""
    found = [run.curve(y, x) for run in runs]
    begin = max(xs[0] for xs, _ in found)
    end = min(xs[-1] for xs, _ in found)
    if begin > end:
        ranges = ", ".join(
            f"{run.path} {xs[0]:g} to {xs[-1]:g}" for run, (xs, _) in zip(runs, found, strict=True)
        )
        raise ConfigurationError(
            f"{label}: its runs have no {X_LABELS[x]} in common: {ranges}. --each draws them one by one."
        )
    grid = np.linspace(begin, end, _NUM_POINTS)
    return grid, np.stack([np.interp(grid, xs, ys) for xs, ys in found])


def plot_curves(curves: Sequence[Curve], path: Path, *, x_label: str, y_label: str) -> None:
    """Plot curves with their intervals into a file, in the format of its suffix (.png, .svg, .pdf).

    Raises:
        MissingPackageError: matplotlib is not installed (``pip install 'rlzmq[plot]'``).
        ConfigurationError: Matplotlib does not know the format, or the file cannot be written.
    """
    figures = import_optional("matplotlib.figure", "A plot", "rlzmq[plot]")
    figure = figures.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        label = textwrap.shorten(curve.label, _LABEL_WIDTH, placeholder=" …")
        (line,) = axes.plot(curve.x, curve.mean, label=label)
        if np.isfinite(curve.low).all():
            axes.fill_between(curve.x, curve.low, curve.high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"cannot write the plot {path}: {error}") from None


Mode = Literal["min", "max"]


def check_mode(mode: object, where: str) -> None:
    """Check that `mode` is "min", "max" or None.

    Raises:
        ConfigurationError: It is something else.
    """
    if mode not in ("min", "max", None):
        raise ConfigurationError(f"{where}(mode={mode!r}): expected 'min' or 'max'.")


def value_at(result: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path such as ``"env_runners/episode_return_mean"``; None if the result lacks it."""
    value: Any = result
    for key in path.split("/"):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def number_at(result: Mapping[str, Any], path: str) -> float | None:
    """Return the finite number at a path, or None."""
    value = value_at(result, path)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None


def score_at(result: Mapping[str, Any], path: str, mode: Mode) -> float:
    """Return the finite number at a path, negated if small ones are good; -inf if there is none."""
    value = number_at(result, path)
    if value is None:
        return -math.inf
    return -value if mode == "min" else value


def flatten(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested result as a flat dict of slash paths."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat
