"""Seconds from the start of a process: to the first result of a run, to a return of 450, and what an import adds.

"first result": `rlzmq train ppo --env CartPole-v1` until its first line, and a script with RLlib's PPO until its
first result, each with two runner processes and the settings that it has for CartPole-v1. "return 450": RLlib's
tuned settings on both sides (see the case ppo), 2 × 16 environments, until the mean return of the newest 100
episodes that ended anywhere is 450; the environments note them, the same way on both sides. "imports": statements
in new processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench import ppo
from scripts.bench._core import Comparison, Side, Turn, seconds_since_start
from scripts.bench._envs import NotingCartPole

IMPORTS = ("import torch, rlzmq", "import torch; from rlzmq import PPOConfig", "import torch")
WINDOW = 100


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    seconds: dict[str, Any] = {"unit": "s", "is_rate": False, "is_fresh": True, "turns": 3}
    sides = {"rlzmq": Side(first_result), "RLlib": Side(first_result_of_rllib, peer="rllib")}
    yield Comparison("first result", sides, goal="≤ 0.25", **seconds)
    sides = {
        "rlzmq": Side(to_450, {"library": "rlzmq"}),
        "RLlib": Side(to_450, {"library": "rllib"}, "rllib"),
    }
    yield Comparison("return 450", sides, goal="≤ 0.5", **seconds)
    statements = {statement: Side(run, {"statement": statement}) for statement in IMPORTS}
    pairs = tuple((statement, IMPORTS[-1]) for statement in IMPORTS[:-1])
    yield Comparison("imports", statements, pairs, **seconds)


def first_result() -> Turn:
    arguments = "--env CartPole-v1 --num-env-runners 2 --stop iterations=1 --run-dir run"
    command = [sys.executable, "-m", "rlzmq", "train", "ppo", *arguments.split()]

    def turn(seconds: float) -> float:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        took_s = next(time.perf_counter() - start for line in process.stdout if line.startswith("iter 1 "))
        process.communicate()
        return took_s

    return turn


def first_result_of_rllib() -> Turn:
    def turn(seconds: float) -> float:
        ppo.rllib("tuned")
        return seconds_since_start()

    return turn


def to_450(library: str) -> Turn:
    returns = Path("returns").resolve()
    returns.touch()
    os.environ["BENCH_RETURNS"] = str(returns)  # for the environments, in whatever process

    def turn(seconds: float) -> float:
        train = getattr(ppo, library)("tuned", env=NotingCartPole)
        while True:
            newest = returns.read_text().split()[-WINDOW:]
            if len(newest) == WINDOW and sum(map(float, newest)) >= 450 * WINDOW:
                return seconds_since_start()
            train(0.0001)  # one iteration

    return turn


def run(statement: str) -> Turn:
    def turn(seconds: float) -> float:
        start = time.perf_counter()
        exec(statement, {})
        return time.perf_counter() - start

    return turn
