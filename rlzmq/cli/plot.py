"""``rlzmq plot``: learning curves of runs, with the mean and interval over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rlzmq.cli.parsing import parse

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


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq plot``; return the exit code."""
    options = parse(
        PlotOptions,
        arguments,
        usage="rlzmq plot RUN… [-o FILE] [options]",
        description="Plot learning curves. Runs that differ in their seed only are one curve: their mean, and its "
        "95 % bootstrap interval over seeds.",
    )
    from rlzmq.core.errors import ConfigurationError
    from rlzmq.telemetry.runs import find_runs, group_by_settings, mean_curve, plot_curves

    if not options.runs:
        raise ConfigurationError("which runs? rlzmq plot RUN… -o curve.png")
    if options.output is None and len(options.runs) > 1:
        raise ConfigurationError("where to write the curves of several directories? Add e.g. -o curve.png.")
    output = options.output or options.runs[0] / "curve.png"
    if options.output is not None and not output.parent.is_dir():
        raise ConfigurationError(f"--output {output}: there is no directory {output.parent}.")
    runs = {found.path.resolve(): found for place in options.runs for found in find_runs(place)}
    groups = (
        {str(found.path): [found] for found in runs.values()}
        if options.each
        else group_by_settings(list(runs.values()))
    )
    curves = []
    for label, group in groups.items():
        seeds = f" ({len(group)} runs)" if len(group) > 1 else ""
        curve = mean_curve(label + seeds, group, options.y, options.x)
        interval = f" [{curve.low[-1]:.2f}, {curve.high[-1]:.2f}]" if len(group) > 1 else ""
        print(f"{curve.label}: {curve.mean[-1]:.2f}{interval} at {options.x} {curve.x[-1]:,.0f}")
        curves.append(curve)
    plot_curves(curves, output, x=options.x, y=options.y)
    print(f"plot        {output}")
    return 0
