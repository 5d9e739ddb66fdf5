"""``rlzmq runs``, ``plot``, ``ckpt`` and ``presets``: runs, their curves and checkpoints; settings that learn."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from rlzmq.cli.main import EXIT_CONFIG
from rlzmq.cli.parsing import command
from rlzmq.core.checkpoint import read_checkpoint, read_manifest
from rlzmq.core.errors import CheckpointError, ConfigurationError, cut, printable
from rlzmq.core.run_dir import RunDir, checkpoints_at, find_checkpoint
from rlzmq.core.synonyms import did_you_mean
from rlzmq.telemetry.runs import (
    RETURN_MEAN,
    X_LABELS,
    check_no_search,
    differing_settings,
    find_runs,
    flatten,
    group_by_settings,
    iqm_curves,
    mean_curve,
    plot_curves,
)
from rlzmq.telemetry.view import size_text, sparkline

if TYPE_CHECKING:
    from rlzmq.algorithms.registry import Preset
    from rlzmq.telemetry.runs import Run

__all__ = ["ckpt", "plot", "presets", "runs", "show_checkpoints"]


@dataclass
class RunsOptions:
    """Options of ``rlzmq runs``."""

    words: tyro.conf.Positional[list[str]] = field(default_factory=list)
    """list (runs), compare (their settings and returns) or clean (remove runs), then run directories or directories of
    runs (default: list runs)."""
    empty: bool = False
    """With clean: remove runs without a result (default: False)."""
    older_than: float | None = None
    """With clean: remove runs that have not changed for this many days (default: none)."""
    yes: bool = False
    """With clean: do not ask (default: False)."""


@command(
    RunsOptions,
    usage="rlzmq runs [list|compare|clean] [RUN…] [options]",
    description="List runs, compare them, or remove those that are no longer needed.",
)
def runs(options: RunsOptions) -> int:
    action, places = "list", list(options.words)
    if places and places[0] in ("list", "compare", "clean"):
        action = places.pop(0)
    paths = [Path(place) for place in places]
    found = {run.path.absolute(): run for path in paths or [Path("runs")] for run in find_runs(path)}
    chosen = sorted(found.values(), key=lambda run: run.changed_s)
    if action == "clean":
        return _clean(chosen, paths, options)
    print("\n".join(_listed(chosen) if action == "list" else _compared(chosen)))
    return 0


def _listed(runs: Sequence[Run]) -> list[str]:
    rows = [["run", "algorithm", "env", "seed", "steps", "return", "state", "changed", "size"]]
    for run in runs:
        rows.append(
            [
                str(run.path), run.algorithm, run.env, "–" if run.seed is None else str(run.seed), *_progress(run)[:2],
                run.state, time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_s)),
                size_text(run.num_bytes),
            ]
        )  # fmt: skip
    return _columns(rows)


def _compared(runs: Sequence[Run]) -> list[str]:
    names = differing_settings(runs)
    rows = [["run", "algorithm", "steps", "return", "best", *names]]
    for run in runs:
        values = [str(run.settings.get(name, "default")) for name in names]
        rows.append([str(run.path), run.algorithm, *_progress(run), *values])
    same = "" if names else "\nno setting differs"
    return [*_columns(rows), *same.splitlines()]


def _progress(run: Run) -> list[str]:
    """Return the last steps and return, and the best return, or dashes."""
    try:
        steps, _ = run.curve("training_iteration")
    except ConfigurationError:
        return ["–"] * 3
    for path in (RETURN_MEAN, f"evaluation/{RETURN_MEAN}"):  # what learns from files has the latter only
        with contextlib.suppress(ConfigurationError):
            _, returns = run.curve(path)
            return [f"{steps[-1]:.0f}", f"{returns[-1]:.2f}", f"{returns.max():.2f}"]
    return [f"{steps[-1]:.0f}", "–", "–"]


def _clean(runs: Sequence[Run], paths: Sequence[Path], options: RunsOptions) -> int:
    """Remove the runs that were named or that meet the criteria."""
    has_criteria = options.empty or options.older_than is not None
    named = {path.absolute() for path in paths}
    if not has_criteria and not named >= {run.path.absolute() for run in runs}:
        raise ConfigurationError(
            "which runs should be removed? Name run directories, or give --empty (without a result) or "
            "--older-than DAYS."
        )
    before_s = math.inf if options.older_than is None else time.time() - options.older_than * 86400
    chosen = [run for run in runs if run.changed_s <= before_s and not (options.empty and run.results)]
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
            with RunDir(run.path):
                shutil.rmtree(run.path)
        except ConfigurationError as error:  # e.g. resumed in the meantime
            print(f"kept        {error}")
            continue
        print(f"removed     {run.path}")
    return 0


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


@dataclass
class PlotOptions:
    """Options of ``rlzmq plot``."""

    runs: tyro.conf.Positional[list[Path]]
    """Run directories, or directories of runs."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File to write (.png, .svg or .pdf), or directory for curve.png (default: that of the run or runs, if it is
    one)."""
    x: Literal["steps", "time", "iterations"] = "steps"
    """The x axis: env steps, seconds or iterations (default: steps)."""
    y: str = "env_runners/episode_return_mean"
    """Path of the value in a result (default: env_runners/episode_return_mean)."""
    each: bool = False
    """Draw a line for each run instead of the mean over those that differ in their seed only (default: False)."""
    iqm: bool = False
    """Compare the directories: a line for each, the interquartile mean of its runs in all envs (default: False)."""


@command(
    PlotOptions,
    usage="rlzmq plot RUN… [-o FILE] [options]",
    description="Plot learning curves. Runs that differ in their seed only are one curve: their mean, and its "
    "95 % bootstrap interval over seeds. With --iqm, each RUN is a directory of runs, and a line.",
)
def plot(options: PlotOptions) -> int:
    if not options.runs:
        raise ConfigurationError("which runs? rlzmq plot RUN… -o curve.png")
    if options.output is None and len(options.runs) > 1:
        raise ConfigurationError("where to write the curves of several directories? Add e.g. -o curve.png.")
    if options.iqm and options.each:
        raise ConfigurationError("--iqm draws a line for each directory, --each for each run: choose one.")
    output = options.output or options.runs[0]
    if output.is_dir():
        output /= "curve.png"
    elif not output.suffix:
        output = output.with_suffix(".png")
    if options.output is not None and not output.parent.is_dir():
        raise ConfigurationError(f"--output {output}: there is no directory {output.parent}.")
    places: dict[str, list[Run]] = {}
    for place in options.runs:
        reasons: list[str] = []
        having = places.setdefault(str(place), [])
        for run in find_runs(place):
            try:
                run.curve(options.y, options.x)
                having.append(run)
            except ConfigurationError as error:
                reasons.append(str(error))
        if not having:
            raise ConfigurationError(reasons[0])
        print("".join(f"left out    {reason}\n" for reason in reasons), end="")
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


@dataclass
class PresetsOptions:
    """Options of ``rlzmq presets``."""

    algorithm: tyro.conf.Positional[str] = ""
    """List the presets of this algorithm only (default: of all)."""
    name: tyro.conf.Positional[str] = ""
    """Show this preset, e.g. cartpole (default: list them)."""


@command(
    PresetsOptions,
    usage="rlzmq presets [ALGORITHM] [NAME]",
    description="List the settings that are known to learn an environment, or show one preset.",
)
def presets(options: PresetsOptions) -> int:
    from rlzmq.algorithms.registry import ALGORITHMS, find_preset, presets_of

    if options.algorithm and options.algorithm.lower() not in ALGORITHMS:
        raise ConfigurationError(
            f"No algorithm {options.algorithm!r}.{did_you_mean(options.algorithm, ALGORITHMS)}"
        )
    if options.name:
        _show(find_preset(options.algorithm.lower(), options.name))
        return 0
    names = [options.algorithm.lower()] if options.algorithm else list(ALGORITHMS)
    presets = [preset for name in names for preset in presets_of(name).values()]
    for preset in presets:
        curve = f"  {_curve(preset)}" if preset.curve else ""
        print(f"{preset.algorithm:<7} {preset.name:<24} {_result(preset)}{curve}\n        {preset.source}")
    print("\nrlzmq presets ppo cartpole shows one; rlzmq train ppo --preset NAME trains with it.")
    return 0


def _show(preset: Preset) -> None:
    from rlzmq.algorithms.registry import get_config_class

    config = get_config_class(preset.algorithm)()
    preset.apply(config, preset.env)
    print(f"{preset.algorithm} {preset.name}: {preset.env}")
    print(f"source  {preset.source}")
    print(f"result  {_result(preset)}")
    for seed, steps in preset.seeds.items():
        print(f"        seed {seed}: {steps:,} env steps")
    if preset.curve:
        print(f"curve   {_curve(preset)}")
        print("        " + ", ".join(f"{steps:,}: {value:g}" for steps, value in preset.curve))
    env = " --env ENV" if preset.is_pattern else "" if config.is_online else " --input DIRECTORY"
    print(f"\n$ rlzmq train {preset.algorithm} --preset {preset.name!r}{env}\n")
    print(config.to_toml(), end="")


def _result(preset: Preset) -> str:
    """Describe what the preset's runs reached."""
    if preset.target is None:
        return "not tried to a target"
    middle = median(preset.seeds.values())
    return f"return {preset.target:g} after {middle:,.0f} env steps ({len(preset.seeds)} seeds)"


def _curve(preset: Preset) -> str:
    return sparkline([value for _, value in preset.curve])


def show_checkpoints(place: Path) -> int:
    """Check and print the checkpoints, and the one to resume from; return 0, or 78 if none is usable.

    Args:
        place: A checkpoint, a directory of them, or a run directory.
    """
    check_no_search(place)
    found = find_checkpoint(place)
    paths = checkpoints_at(place)
    if not paths and not place.is_dir():
        raise ConfigurationError(f"{place} does not exist: expected a run directory or a checkpoint.")
    for path in paths or [place]:
        try:
            read_checkpoint(path)
            manifest = read_manifest(path)
        except CheckpointError as error:
            print(f"{path.name:<12} NOT USABLE  {printable(str(error))}")
            continue
        about, files = manifest["about"], manifest["files"]
        facts = [f"{sum(file['bytes'] for file in files.values())} bytes in {len(files)} files"]
        names = {"score": "return", "num_env_steps_trained_lifetime": "steps", "written": "written"}
        facts += [f"{label} {about[name]}" for name, label in names.items() if about.get(name) is not None]
        print(printable(f"{path.name:<12} whole       {about.get('algorithm', '?')}  {'  '.join(facts)}"))
        if len(paths) < 2:
            for name in sorted({str(Path(name).parent) for name in files}):
                print(f"             {printable(name)}")
    if found.path is None:
        print("nothing here to resume")
        return EXIT_CONFIG
    print(f"resume from  {found.path}")
    return 0


_LEARNER = "learner_group/learner"
_LISTED = ("config", "accounting", "algorithm", f"{_LEARNER}/counters")
"""Parts whose single values are printed; of other parts, how many differ."""
_MAX_BYTES = 80  # of a printed value
_ABSENT = object()


@dataclass
class CkptOptions:
    """Options of ``rlzmq ckpt``."""

    action: tyro.conf.Positional[Literal["ls", "diff"]]
    """List checkpoints and check every byte, or show what differs between two."""
    paths: tyro.conf.Positional[list[str]]
    """ls: a run directory or checkpoint. diff: two of them; a run directory stands for its newest checkpoint."""


@command(
    CkptOptions,
    usage="rlzmq ckpt {ls RUN_OR_CHECKPOINT | diff A B}",
    description="List and check checkpoints, or show what differs between two: settings, weights, counters.",
)
def ckpt(options: CkptOptions) -> int:
    expected = {"ls": 1, "diff": 2}[options.action]
    if len(options.paths) != expected:
        raise ConfigurationError(
            f"rlzmq ckpt {options.action}: expected {expected} checkpoint{'s' * (expected - 1)} or run director"
            f"{'ies' if expected > 1 else 'y'}, got {len(options.paths)}: {' '.join(options.paths)}"
        )
    if options.action == "ls":
        return show_checkpoints(Path(options.paths[0]))
    return _diff(*options.paths)


def _diff(first: str, second: str) -> int:
    from rlzmq.algorithms.checkpoints import checkpoint_place

    sides = []
    for name, path in (("A", first), ("B", second)):
        place = checkpoint_place(path)
        sides.append(_components(read_checkpoint(place)))
        print(f"{name}  {printable(str(place))}")
    lines = []
    for part in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [side.get(part) for side in sides]
        if None in pair:
            lines.append(f"{part}  only in {'B' if pair[0] is None else 'A'}")
        else:
            lines += [f"{part}  {line}" for line in _differences(part, *pair)]  # type: ignore[arg-type]
    print(printable("\n".join(lines or ["nothing differs"]), keep="\n"))
    return 0


def _components(components: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the leaves of each component by their paths; the learner's parts and modules are parts of their own."""
    found: dict[str, Any] = {}
    for component, state in components.items():
        if component != _LEARNER:
            found[component] = state
            continue
        for name, part in state.items():
            modules = part.items() if name == "rl_module" else ()
            found |= {f"{component}/{name}/{module_id}": module for module_id, module in modules}
            if name != "rl_module":
                found[f"{component}/{name}"] = part
    return {
        part: flatten(state) if isinstance(state, Mapping) else {"": state} for part, state in found.items()
    }


def _differences(part: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value that differs in a listed part, or in shape; then one about all others."""
    num_others, distances = 0, {}
    names = dict.fromkeys([*first, *second])
    for name in names:
        old, new = first.get(name, _ABSENT), second.get(name, _ABSENT)
        if _is_same(old, new):
            continue
        is_listed = part == "config" or (part in _LISTED and not isinstance(old, (list, np.ndarray)))
        if is_listed or old is _ABSENT or new is _ABSENT or _shape(old) != _shape(new):
            yield f"{name.removeprefix('values/')}  {_text(old, part)} → {_text(new, part)}"
        else:
            num_others += 1
            if isinstance(old, np.ndarray) and old.dtype.kind == "f":
                gaps = np.abs(old.astype(np.float64) - new.astype(np.float64))
                distances[name] = float(np.nanmax(gaps, initial=0.0))
    if num_others:
        largest = max(distances, key=distances.__getitem__, default="")
        by = f", the largest difference is {distances[largest]:.3g} in {largest}" if largest else ""
        yield f"{num_others} of {len(names)} values differ{by}"


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return _shape(first) == _shape(second) and first.tobytes() == second.tobytes()
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(map(_is_same, first.values(), second.values()))
    return bool(first == second or (first != first and second != second))


def _shape(value: object) -> str:
    return f"{value.shape} {value.dtype}" if isinstance(value, np.ndarray) else ""


def _text(value: object, part: str) -> str:
    if value is _ABSENT:
        return "default" if part == "config" else "absent"
    return _shape(value) or cut(repr(value), _MAX_BYTES)
