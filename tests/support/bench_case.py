"""A case of the benchmarks whose contenders count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench._core import Comparison, Side, Turn, timed


def counting(per_call: int) -> Turn:
    """A contender: its work is to count."""
    return timed(lambda: per_call)


def noting(path: str, name: str) -> Turn:
    """A contender that writes down when its turns begin and end, and in which process."""

    def turn(seconds: float) -> float:
        with Path(path).open("a") as file:
            file.write(f"{name} begins\n")
            file.flush()
            file.write(f"{name} ends\n")
        return float(os.getpid())

    return turn


def failing() -> Turn:
    raise ValueError("no such environment")


def comparisons(options: Any) -> Iterator[Comparison]:
    sides = {"fast": Side(counting, {"per_call": 1000}), "slow": Side(counting, {"per_call": 1})}
    yield Comparison("counting", sides, turns=2, turn_s=0.02, goal="≥ 2")
    yield Comparison("against a peer", {"fast": sides["fast"], "RLlib": Side(counting, {}, "rllib")})
