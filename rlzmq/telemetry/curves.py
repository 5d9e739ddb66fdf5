"""Curves over several runs: mean and bootstrap interval over seeds, and their picture."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.extras import import_optional
from rlzmq.core.score_statistics import bootstrap_interval
from rlzmq.telemetry.runs import Run

__all__ = ["Curve", "differing_settings", "group_by_settings", "mean_curve", "plot_curves"]

_NUM_POINTS = 200
_LABEL_WIDTH = 80
"""Characters of a label in a picture's legend."""
_X_LABELS = {"steps": "env steps", "time": "time (s)", "iterations": "iterations"}


@dataclass(frozen=True)
class Curve:
    """Mean and interval over runs.

    Attributes:
        label: What the runs have in common.
        x: ``[N]``, ascending.
        mean: ``[N]``.
        low, high: Ends of the 95 % interval ``[N]``; NaN for a single run.
    """

    label: str
    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def group_by_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return runs of the same algorithm, env and settings but for the seed, by a label of what sets them apart."""
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
    """Return the names of settings that not all runs have the same value of."""
    names = sorted({name for run in runs for name in run.settings})
    return [
        name
        for name in names
        if len({json.dumps(run.settings.get(name, "default"), sort_keys=True) for run in runs}) > 1
    ]


def mean_curve(label: str, runs: Sequence[Run], y: str, x: str) -> Curve:
    """Return the mean over runs, linearly interpolated at common x: where all of them have values.

    Args:
        label: The curve's label.
        runs: At least one.
        y, x: See `Run.curve`.

    Raises:
        ConfigurationError: A run has no such values, or the runs have no x in common.
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
    """Draw curves with their intervals into a file; its suffix is the format (.png, .svg, .pdf).

    Raises:
        MissingPackageError: matplotlib is not installed (``pip install 'rlzmq[plot]'``).
        ConfigurationError: The suffix is no format of matplotlib, or the file cannot be written.
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
