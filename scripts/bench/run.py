"""Run benchmarks: rlzmq against bare loops, other settings and other libraries, turn about in one run.

    python scripts/bench/run.py --list
    python scripts/bench/run.py sampling learner
    python scripts/bench/run.py sampling --only lstm --peers rllib --turns 20 --seconds 0.5
    python scripts/bench/run.py sampling --help        # what the case compares

Each side is a process. Ratios are medians over turns, with their range: of values and, for rates, of values per
processor second of all processes of a side. Missing peers are installed, each in a virtualenv under
``~/.cache/rlzmq/peers``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts.bench._core import Comparison, Conditions, compare, lines_of, ratios, spread
from scripts.bench._peers import PEERS, python_of

FOLDER = Path(__file__).resolve().parent


def case_names() -> list[str]:
    """Return the names of all cases."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py") if path.stem != "run")


def load(name: str) -> ModuleType:
    """Return a case's module."""
    return importlib.import_module(f"scripts.bench.{name}")


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line names."""
    names = case_names()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="see --list")
    parser.add_argument("-h", "--help", action="store_true", help="this text, or that of the cases named")
    parser.add_argument("--list", action="store_true", help="all cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="comparisons with this in their titles")
    parser.add_argument(
        "--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS), help="(default: all)"
    )
    parser.add_argument("--turns", type=int, help="of each side (default: the case's)")
    parser.add_argument("--seconds", type=float, help="of a turn (default: the case's)")
    parser.add_argument(
        "--busy", type=float, default=0.25, help="share of the cores that other work may take (0.25)"
    )
    parser.add_argument("--patience", type=float, default=30.0, help="seconds to wait for that (30)")
    parser.add_argument(
        "--autogroup", type=int, help="nice value of the scheduler's groups of all sides (Linux)"
    )
    parser.add_argument("--json", type=Path, help="file of results, to which these are added")
    parser.add_argument("--plot", type=Path, help="picture of all results in that file (needs matplotlib)")
    options, _ = parser.parse_known_args(arguments)
    unknown = set(options.cases) - set(names)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    modules = [load(name) for name in options.cases]
    for name, module in zip(options.cases, modules, strict=True):
        if hasattr(module, "add_options"):
            module.add_options(parser.add_argument_group(name))
    options = parser.parse_args(arguments)
    if options.help or not (modules or options.list or options.plot):
        print("\n\n".join([*(str(module.__doc__).strip() for module in modules), parser.format_help()]))
    elif options.list:
        for name in names:
            print(f"{name:12} {str(load(name).__doc__).splitlines()[0]}")
    else:
        for name, module in zip(options.cases, modules, strict=True):
            run(name, module, options)
        if options.plot:
            plot(json.loads(options.json.read_text()), options.plot)


def run(name: str, module: ModuleType, options: argparse.Namespace) -> None:
    """Carry out a case's comparisons, or print its report."""
    if hasattr(module, "report"):
        for line in module.report(options):
            print(line, flush=True)
        return
    conditions = Conditions(options.turns, options.seconds, options.busy, options.patience, options.autogroup)
    for comparison in chosen(module, options):
        pythons = {}
        for peer in {side.peer for side in comparison.sides.values() if side.peer}:
            if (python := python_of(peer)) is not None:
                pythons[peer] = python
        comparison = with_peers(comparison, set(pythons))
        if len(comparison.sides) < 2:
            print(f"{comparison.title}: nothing to compare with")
            continue
        found = compare(comparison, pythons, conditions)
        print("\n".join(lines_of(comparison, found)), flush=True)
        if options.json:
            keep(options.json, f"{name}: {comparison.title}", as_json(comparison, found))


def chosen(module: ModuleType, options: argparse.Namespace) -> Iterator[Comparison]:
    """Yield a case's comparisons that the command line asks for, without peers that it does not name."""
    for comparison in module.comparisons(options):
        if options.only in comparison.title:
            yield with_peers(comparison, set(options.peers))


def with_peers(comparison: Comparison, peers: set[str]) -> Comparison:
    """Return a comparison without the sides of other peers."""
    sides = {name: side for name, side in comparison.sides.items() if side.peer in peers | {""}}
    pairs = tuple(pair for pair in comparison.ratios if set(pair) <= set(sides))
    return dataclasses.replace(comparison, sides=sides, ratios=pairs)


def as_json(comparison: Comparison, found: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison's results as what JSON can express."""
    return {
        "unit": comparison.unit,
        "ratios": list(ratios(comparison, found)),
        "sides": {name: spread([one.value for one in turns]) for name, turns in found.items()},
        "turns": {name: [dataclasses.astuple(one) for one in turns] for name, turns in found.items()},
        "machine": f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
    }


def keep(path: Path, title: str, result: dict[str, Any]) -> None:
    """Add a result to a file of them, in place of an earlier one with the same title."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[title] = result
    path.write_text(json.dumps(results, indent=1))


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the ratios of all results with their ranges, and the goals."""
    import matplotlib.pyplot as plt

    rows = [
        (f"{title}: {ratio['of']} ÷ {ratio['to']}", ratio)
        for title, result in results.items()
        for ratio in result["ratios"]
    ][::-1]
    figure, axis = plt.subplots(figsize=(9, 0.6 + 0.24 * len(rows)))
    for index, (_, ratio) in enumerate(rows):
        middle, least, greatest = ratio["ratio"]
        axis.barh(index, middle - 1, left=1, color="tab:blue", alpha=0.7)
        axis.plot([least, greatest], [index, index], color="black", linewidth=1)
        goal = ratio["goal"].removeprefix("≥").removeprefix("≤").strip()
        if goal:
            axis.plot(float(goal), index, "|", color="tab:red", markersize=11, markeredgewidth=2)
    axis.set_xscale("log", base=2)
    low, high = axis.get_xlim()
    ticks = [2 ** (power / 2) for power in range(-10, 15)]
    axis.set_xticks([tick for tick in ticks if low <= tick <= high])
    axis.xaxis.set_major_formatter("{x:.2g}")
    axis.axvline(1.0, color="gray", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axis.set_xlabel("ratio: median (bar), range (line), goal (red)", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
