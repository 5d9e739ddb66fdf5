"""``rlzmq runs``: list runs, compare their settings and returns, or remove runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from rlzmq.cli.parsing import parse
from rlzmq.core.checkpoint_series import lock_run
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.printable import printable
from rlzmq.telemetry.runs import differing_settings, find_runs

if TYPE_CHECKING:
    from rlzmq.telemetry.runs import Run

__all__ = ["RunsOptions", "run"]


@dataclass
class RunsOptions:
    """Options of ``rlzmq runs``."""

    action: tyro.conf.Positional[Literal["list", "compare", "clean"]] = "list"
    """List runs, compare their settings and returns, or remove runs (default: list)."""
    runs: tyro.conf.Positional[list[Path]] = field(default_factory=list)
    """Run directories, or directories of runs (default: runs)."""
    empty: bool = False
    """With clean: remove runs without a result (default: False)."""
    older_than: float | None = None
    """With clean: remove runs that have not changed for this many days (default: none)."""
    yes: bool = False
    """With clean: do not ask (default: False)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq runs``; return the exit code."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in ("list", "compare", "clean"):
        arguments = ["list", *arguments]  # rlzmq runs DIRECTORY
    options = parse(
        RunsOptions,
        arguments,
        usage="rlzmq runs [list|compare|clean] [RUN…] [options]",
        description="List runs, compare them, or remove those that are no longer needed.",
    )

    places = options.runs or [Path("runs")]
    found = {run.path.absolute(): run for place in places for run in find_runs(place)}
    runs = sorted(found.values(), key=lambda run: run.changed_s)
    if options.action == "clean":
        return _clean(runs, options)
    print("\n".join(_listed(runs) if options.action == "list" else _compared(runs)))
    return 0


def _listed(runs: Sequence[Run]) -> list[str]:
    rows = [["run", "algorithm", "env", "seed", "steps", "return", "state", "changed", "size"]]
    for run in runs:
        rows.append(
            [
                str(run.path), run.algorithm, run.env, "–" if run.seed is None else str(run.seed), *_progress(run),
                run.state, time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_s)),
                _size(run.num_bytes),
            ]
        )  # fmt: skip
    return _columns(rows)


def _compared(runs: Sequence[Run]) -> list[str]:
    names = differing_settings(runs)
    rows = [["run", "algorithm", "steps", "return", "best", *names]]
    for run in runs:
        values = [str(run.settings.get(name, "default")) for name in names]
        rows.append([str(run.path), run.algorithm, *_progress(run), _best(run), *values])
    same = "" if names else "\nno setting differs"
    return [*_columns(rows), *same.splitlines()]


def _progress(run: Run) -> tuple[str, str]:
    """Return the last steps and return, or dashes."""
    try:
        steps, returns = run.curve()
    except ConfigurationError:
        return "–", "–"
    return f"{steps[-1]:.0f}", f"{returns[-1]:.2f}"


def _best(run: Run) -> str:
    try:
        return f"{run.curve()[1].max():.2f}"
    except ConfigurationError:
        return "–"


def _clean(runs: Sequence[Run], options: RunsOptions) -> int:
    """Remove the runs that were named or that meet the criteria."""
    has_criteria = options.empty or options.older_than is not None
    named = {path.absolute() for path in options.runs}
    if not has_criteria and not named >= {run.path.absolute() for run in runs}:
        raise ConfigurationError(
            "which runs should be removed? Name run directories, or give --empty (without a result) or "
            "--older-than DAYS."
        )
    chosen = [run for run in runs if _meets(run, options)]
    live = [run for run in chosen if run.state != "ended"]
    for run in live:
        print(f"kept        {run.path}: {run.state}")
    links = [run for run in chosen if run.path.is_symlink()]
    for run in links:
        print(f"kept        {run.path}: it is a link")
    chosen = [run for run in chosen if run not in live and run not in links]
    if not chosen:
        print("nothing to remove")
        return 0
    print("\n".join(_listed(chosen)))
    if not options.yes and not _agrees(f"remove {len(chosen)} run{'s' * (len(chosen) > 1)} for good? [y/N] "):
        print("nothing was removed")
        return 0
    for run in chosen:
        try:
            lock = lock_run(run.path)
        except ConfigurationError as error:  # e.g. resumed in the meantime
            print(f"kept        {error}")
            continue
        shutil.rmtree(run.path)
        if lock is not None:
            lock.release()
        print(f"removed     {run.path}")
    return 0


def _meets(run: Run, options: RunsOptions) -> bool:
    if options.older_than is not None and time.time() - run.changed_s < options.older_than * 86400:
        return False
    return not (options.empty and run.results)


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError("no terminal to ask on: give --yes to remove them.")
    return input(question).strip().lower() in ("y", "yes")


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        printable("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
