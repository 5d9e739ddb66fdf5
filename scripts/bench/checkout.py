"""This checkout against another one of the project (``--against PATH``): sampling and `Learner.update`.

Cases as in sampling (MLP 2×64) and learner, in many short turns. The other checkout's package is loaded, with the
packages and cases of this one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench import learner, sampling
from scripts.bench._core import Comparison, Side

RUNNERS = [("sync", 1), ("sync", 8), ("sync", 32), (sampling.VECTOR, 8), (sampling.VECTOR, 256)]


def add_options(parser: Any) -> None:
    parser.add_argument("--against", type=Path, metavar="PATH", help="the other checkout", default=Path())


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    other = {"root": str(options.against.resolve())}
    for mode, num_envs in RUNNERS:
        settings = {"variant": "", "mode": mode, "num_envs": num_envs}
        sides = {"this": Side(sampling.rlzmq, settings), "other": Side(sampling.rlzmq, settings | other)}
        yield Comparison(f"sampling, {mode}, {num_envs} envs", sides, turns=40, turn_s=0.2)
    for case in learner.CASES:
        sides = {
            "this": Side(learner.rlzmq, {"case": case}),
            "other": Side(learner.rlzmq, {"case": case, **other}),
        }
        yield Comparison(f"update, {case}", sides, unit="rows/s", turns=20, turn_s=0.4)
