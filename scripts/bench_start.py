"""Seconds from process start to the first result of ``rlzmq train ppo --env CartPole-v1``, and what it leaves.

``python scripts/bench_start.py [--runs 5] [further options of rlzmq train]``. The target is 5 s on two cores, torch's
import included.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


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
    options, arguments = parser.parse_known_args()
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
