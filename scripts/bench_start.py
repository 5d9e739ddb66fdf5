"""Seconds from process start to the first result of ``rlzmq train ppo --env CartPole-v1``, and what it leaves.

    python scripts/bench_start.py [--runs 5] [further options of rlzmq train]
    python scripts/bench_start.py --stages     # when each stage of a start begins and ends: 2 runners, broker, 2 ranks
    python scripts/bench_start.py --imports    # what importing rlzmq adds to the import of torch

The target is 5 s on two cores, torch's import included.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

STAGES = {
    "environment made once, for its spaces": (
        "algorithms.algorithm_config",
        "AlgorithmConfig",
        "single_spaces",
    ),
    "fork server": ("actors.system", "ActorSystem", "start"),
    "broker": ("driver.broker_pipeline", "BrokerPipeline", "start_broker"),
    "env runners": ("driver.async_env_runner_group", "AsyncEnvRunnerGroup", "start"),
    "learner ranks": ("driver.async_learner_group", "AsyncLearnerGroup", "start"),
    "all connected, learner group formed": ("driver.broker_pipeline", "BrokerPipeline", "start"),
    "first batch sampled and trained": ("driver.session", "Session", "run_update"),
}
"""By stage, the method whose first call it is: module below ``rlzmq``, class, name."""


def stages() -> list[tuple[str, float, float]]:
    """(stage, its begin and end in seconds after this process's start) of one start, in the order of their ends."""
    from rlzmq.actors import forkserver

    forkserver.prestart()  # as `rlzmq train` does: it imports torch while this process does
    started = psutil.Process(os.getpid()).create_time()
    found: list[tuple[str, float, float]] = []

    def note(stage: str, begin: float) -> None:
        if stage not in (known for known, _, _ in found):
            found.append((stage, begin - started, time.time() - started))

    for stage, (module, class_name, name) in STAGES.items():
        owner = getattr(importlib.import_module(f"rlzmq.{module}"), class_name)
        setattr(owner, name, _timed(getattr(owner, name), functools.partial(note, stage)))
    import torch  # noqa: F401

    from rlzmq import PPOConfig

    config = PPOConfig.preset("CartPole-v1").env_runners(num_env_runners=2).learners(num_learners=2)
    note("imports", started)
    with config.build() as algo:
        algo.train()
    return found


IMPORTS = ("import torch", "import torch, rlzmq", "import torch; from rlzmq import PPOConfig")


def import_seconds(statement: str) -> tuple[float, float]:
    """(wall time, processor time) of a statement in a new process."""
    code = (
        "import time; wall, used = time.perf_counter(), time.process_time()\n"
        f"{statement}\n"
        "print(time.perf_counter() - wall, time.process_time() - used)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    wall, used = map(float, done.stdout.split())
    return wall, used


def _timed(method: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.time()
            result = method(*args, **kwargs)
            note(begin)
            return result

        return call

    @functools.wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        begin = time.time()
        result = await method(*args, **kwargs)
        note(begin)
        return result

    return call_async


def first_result(arguments: list[str], folder: str) -> tuple[float, float, list[str]]:
    """(seconds to the first result, seconds to the end, what was left behind) of one run."""
    command = [
        sys.executable, "-m", "rlzmq", "train", "ppo", "--env", "CartPole-v1", "--stop", "iterations=2",
        "--run-dir", str(Path(folder) / "run"), *arguments,
    ]  # fmt: skip
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    family: list[psutil.Process] = []
    first = float("nan")
    for line in process.stdout:
        if line.startswith("iter 1 "):
            first = time.perf_counter() - start
            family = psutil.Process(process.pid).children(recursive=True)
    process.wait()
    end = time.perf_counter() - start
    _, alive = psutil.wait_procs(family, timeout=1)
    return first, end, [f"process {p.pid}" for p in alive]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stages", action="store_true", help="one start, stage by stage")
    parser.add_argument("--imports", action="store_true", help="imports, each in a new process, in turn")
    options, arguments = parser.parse_known_args()
    if options.imports:
        turns = [[import_seconds(statement) for statement in IMPORTS] for _ in range(options.runs)]
        for statement, *times in zip(IMPORTS, *turns, strict=True):
            wall, used = (statistics.median(kind) for kind in zip(*times, strict=True))
            print(f"{statement:50} {wall:6.3f} s, processor time {used:6.3f} s")
        return
    if options.stages:
        print(f"{'stage':40} {'begins':>8} {'ends':>8} {'takes':>8}")
        for stage, begin, end in stages():
            print(f"{stage:40} {begin:7.2f}s {end:7.2f}s {end - begin:7.2f}s")
        return
    firsts, ends = [], []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            first, end, left = first_result(arguments, folder)
        firsts.append(first)
        ends.append(end)
        text = f"first result after {first:.2f} s, ended after {end:.2f} s"
        print(f"{text}, left behind: {left or 'nothing'}", flush=True)
    print(f"median: first result {statistics.median(firsts):.2f} s, end {statistics.median(ends):.2f} s")


if __name__ == "__main__":
    main()
