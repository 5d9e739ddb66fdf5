"""``rlzmq plot``: learning curves of runs, with the mean or interquartile mean and interval over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError

__all__ = ["PlotOptions", "run"]


@dataclass
class PlotOptions:
    """Options of ``rlzmq plot``."""

    runs: tyro.conf.Positional[list[Path]]
    """Run directories, or directories of runs."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File to write: .png, .svg or .pdf (default: curve.png in the directory of the run or runs, if it is one)."""
    x: Literal["steps", "time", "iterations"] = "steps"
    """The x axis: env steps, seconds or iterations (default: steps)."""
    y: str = "env_runners/episode_return_mean"
    """Path of the value in a result (default: env_runners/episode_return_mean)."""
    each: bool = False
    """Draw a line for each run instead of the mean over those that differ in their seed only (default: False)."""
    iqm: bool = False
    """Compare the directories: a line for each, the interquartile mean of its runs in all envs (default: False)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq plot``; return the exit code."""
    options = parse(
        PlotOptions,
        arguments,
        usage="rlzmq plot RUN… [-o FILE] [options]",
        description="Plot learning curves. Runs that differ in their seed only are one curve: their mean, and its "
        "95 % bootstrap interval over seeds. With --iqm, each RUN is a directory of runs, and a line.",
    )
    from rlzmq.telemetry.runs import (
        X_LABELS,
        find_runs,
        group_by_settings,
        iqm_curves,
        mean_curve,
        plot_curves,
    )

    if not options.runs:
        raise ConfigurationError("which runs? rlzmq plot RUN… -o curve.png")
    if options.output is None and len(options.runs) > 1:
        raise ConfigurationError("where to write the curves of several directories? Add e.g. -o curve.png.")
    if options.iqm and options.each:
        raise ConfigurationError("--iqm draws a line for each directory, --each for each run: choose one.")
    output = options.output or options.runs[0] / "curve.png"
    if options.output is not None and not output.parent.is_dir():
        raise ConfigurationError(f"--output {output}: there is no directory {output.parent}.")
    places = {str(place): find_runs(place) for place in options.runs}
    runs = list({run.path.resolve(): run for found in places.values() for run in found}.values())
    x_label, y_label, end = X_LABELS[options.x], options.y, ""
    if options.iqm:
        groups = places
        if len({run.env for run in runs}) > 1:
            x_label, end = f"fraction of each env's {x_label}", "the end"
        y_label = f"{y_label}, normalised: IQM"
        curves = iqm_curves(groups, options.y, options.x)
    else:
        groups = {str(run.path): [run] for run in runs} if options.each else group_by_settings(runs)
        curves = [mean_curve(label, group, options.y, options.x) for label, group in groups.items()]
    labelled = []
    for curve, group in zip(curves, groups.values(), strict=True):
        seeds = f" ({len(group)} runs)" if len(group) > 1 else ""
        interval = f" [{curve.low[-1]:.2f}, {curve.high[-1]:.2f}]" if len(group) > 1 else ""
        print(
            f"{curve.label}{seeds}: {curve.mean[-1]:.2f}{interval} at {end or f'{options.x} {curve.x[-1]:,.0f}'}"
        )
        labelled.append(dataclasses.replace(curve, label=curve.label + seeds))
    plot_curves(labelled, output, x_label=x_label, y_label=y_label)
    print(f"plot        {output}")
    return 0
