"""Learning curves over several runs: mean and bootstrap interval over seeds, and plots of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import import_optional
from rlzmq.core.score_statistics import bootstrap_interval
from rlzmq.telemetry.runs import Run

__all__ = ["Curve", "differing_settings", "group_by_settings", "mean_curve", "plot_curves"]

_NUM_POINTS = 200
_LABEL_WIDTH = 80
"""Maximum number of characters per label in a plot's legend."""
_X_LABELS = {"steps": "env steps", "time": "time (s)", "iterations": "iterations"}


@dataclass(frozen=True)
class Curve:
    """The mean and interval over several runs.

    Attributes:
        label: The settings that the runs share.
        x: ``[N]``, ascending.
        mean: ``[N]``.
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
    found = [run.curve(y, x) for run in runs]
    if len(found) == 1:
        nothing = np.full(len(found[0][0]), np.nan)
        return Curve(label, *found[0], nothing, nothing)
    begin = max(xs[0] for xs, _ in found)
    end = min(xs[-1] for xs, _ in found)
    if begin > end:
        ranges = ", ".join(
            f"{run.path} {xs[0]:g} to {xs[-1]:g}" for run, (xs, _) in zip(runs, found, strict=True)
        )
        raise ConfigurationError(f"{label}: its runs have no {_X_LABELS[x]} in common: {ranges}.")
    grid = np.linspace(begin, end, _NUM_POINTS)
    values = np.stack([np.interp(grid, xs, ys) for xs, ys in found])
    low, high = bootstrap_interval(values)
    return Curve(label, grid, values.mean(axis=0), low, high)


def plot_curves(curves: Sequence[Curve], path: Path, *, x: str, y: str) -> None:
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
    axes.set(xlabel=_X_LABELS[x], ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"cannot write the plot {path}: {error}") from None
