"""Ends runs at random times with each signal, and checks what remains of them.

    python scripts/end_runs.py --runs 200

Each run is `rlzmq train` of PPO with two runners and two learners, or of APPO, DQN or IMPALA with fewer processes. At a
random time (from its very start on) it gets

* SIGTERM, SIGHUP or SIGUSR1: it must exit with 75 (resumable) within 10 s, with a checkpoint that loads and has all
  iterations of metrics.jsonl; the same if every process of the run gets the signal, and if it gets all of them in a
  random order,
* SIGINT, once or twice: it must exit with 130 within 5 s, with such a checkpoint,
* SIGKILL: one second later none of its processes, sockets, shared memory blocks or temporary directories exists.

The same is checked after the other signals. Exit code 1: a guarantee was broken.

Shared memory of other programs counts as left, unless it runs with a /dev/shm of its own:

    unshare -m sh -c 'mount -t tmpfs none /dev/shm && exec python scripts/end_runs.py --runs 50'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

KINDS = {
    "SIGTERM": (signal.SIGTERM, 75, 10.0),
    "SIGTERM to all": (signal.SIGTERM, 75, 10.0),
    "SIGHUP": (signal.SIGHUP, 75, 10.0),
    "SIGHUP to all": (signal.SIGHUP, 75, 10.0),
    "SIGUSR1": (signal.SIGUSR1, 75, 10.0),
    "mixed to all": (signal.SIGUSR1, 75, 10.0),
    "SIGINT": (signal.SIGINT, 130, 5.0),
    "SIGINT twice": (signal.SIGINT, 130, 5.0),
    "SIGKILL": (signal.SIGKILL, -signal.SIGKILL, 1.0),
}
_LEFT_S = 1.0  # nothing of the run may exist longer than this after the driver's end
_DEADLINE_S = 60.0


@dataclass
class Figures:
    """Results by signal."""

    ended_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gone_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    codes: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    num_checkpoints: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


ALGORITHMS = {
    "ppo": "--env-runners 2 --learners 2 --batch-size-per-learner 240 --minibatch-size 60 --num-epochs 2",
    "appo": "--env-runners 1 --learners 1 --batch-size-per-learner 240",
    "dqn": "--env-runners 1 --learners 0 --min-sample-timesteps-per-iteration 50",
    "impala": "--env-runners 0 --learners 0 --batch-size-per-learner 240",
}


def command(run: Path, algorithm: str) -> list[str]:
    """Return the command of the run: an update takes about 50 ms, checkpoints are written continuously."""
    return [
        sys.executable, "-m", "rlzmq", "train", algorithm, "--env", "CartPole-v1", "--preset", "none",
        *ALGORITHMS[algorithm].split(), "--envs-per-env-runner", "4", "--min-time-s-per-iteration", "0",
        "--checkpoint-every-s", "0.2", "--run-dir", str(run), "--resume", "auto",
    ]  # fmt: skip


def signal_all(pid: int, numbers: Sequence[int]) -> None:
    """Send signals to all processes of a run, the driver among them, as systemd and scancel do."""
    family = [psutil.Process(pid)]
    family += family[0].children(recursive=True)
    for number in numbers:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def belongings(mark: str, runtime: Path, shm_before: set[str]) -> list[str]:
    """Return the processes with the run's mark in their environment; its sockets, directories and shared memory."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("END_RUNS_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"process {process.pid} {process.name()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    for directory, _, names in os.walk(runtime):  # it may be removed meanwhile
        left += [f"file {directory}/{name}" for name in names]
    left += [f"directory {path}" for path in runtime.iterdir() if path.is_dir()]
    with open("/proc/net/unix") as sockets:
        left += [f"socket {line.split()[-1]}" for line in sockets if str(runtime) in line]
    blocks = set(os.listdir("/dev/shm")) - shm_before
    left += [f"shared memory {name}" for name in sorted(blocks) if not is_mapped(name)]
    return left


def is_mapped(name: str) -> bool:
    """Return whether a process uses this block; it is of another program, since the run's are counted above."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in maps.read_text():
                return True
        except OSError:
            continue
    return not Path("/dev/shm", name).exists()


def wait_until_gone(mark: str, runtime: Path, shm_before: set[str], since: float) -> tuple[float, list[str]]:
    """Return the seconds from `since` until nothing was left, and what was left last."""
    last: list[str] = []
    while (left := belongings(mark, runtime, shm_before)) and time.monotonic() - since < 10.0:
        last = left
        time.sleep(0.02)
    return time.monotonic() - since, last


def end_one(
    kind: str, number: int, rng: random.Random, scratch: Path, latest_s: float, seen: Figures
) -> None:
    """Start a run, end it, record the results."""
    from rlzmq.algorithms.checkpoints import read_algorithm
    from rlzmq.core.errors import CheckpointError
    from rlzmq.core.run_dir import find_checkpoint

    number_of_signal, expected, limit_s = KINDS[kind]
    run, runtime = scratch / f"run-{number}", scratch / f"t{number}"
    runtime.mkdir()
    mark = f"{os.getpid()}-{number}"
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "END_RUNS_MARK": mark,
        "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "torch"),  # torch's own, meant to stay
    }  # fmt: skip
    shm_before = set(os.listdir("/dev/shm"))
    log = (scratch / f"log-{number}").open("w+")
    algorithm = list(ALGORITHMS)[number % len(ALGORITHMS)] if number % 2 else "ppo"
    process = subprocess.Popen(
        command(run, algorithm), stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        wait_for_python(process.pid)
        trains = rng.random() < 0.5  # otherwise it may not have trained yet, depending on the machine
        if trains:
            wait_for_training(log.name)
        after_s = rng.uniform(0.0, 2.0 if trains else latest_s)
        time.sleep(after_s)
        start = time.monotonic()
        if kind.endswith("to all"):
            others = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1] if kind == "mixed to all" else []
            rng.shuffle(others)
            with contextlib.suppress(psutil.NoSuchProcess):
                signal_all(process.pid, [number_of_signal, *others])
        else:
            process.send_signal(number_of_signal)
        if kind == "SIGINT twice":
            time.sleep(rng.uniform(0.0, 0.3))
            start = time.monotonic()
            process.send_signal(number_of_signal)
        code = process.wait(_DEADLINE_S)
        end = time.monotonic()
    except subprocess.TimeoutExpired:
        seen.violations.append(f"{kind} at {after_s:.2f} s: still there after {_DEADLINE_S:g} s\n{text(log)}")
        return
    finally:
        process.kill()
        process.wait()
    gone_s, left = wait_until_gone(mark, runtime, shm_before, end)
    problems = []
    if code != expected:
        problems.append(f"exit code {code}, expected {expected}")
    if kind != "SIGKILL" and end - start > limit_s:
        problems.append(f"it took {end - start:.1f} s, more than {limit_s:g} s")
    if gone_s > _LEFT_S:
        problems.append(f"after {_LEFT_S:g} s there was something left, after {gone_s:.1f} s: {left[:5]}")
    output = text(log)
    if " at 0x" in output or "Traceback" in output:
        problems.append("a traceback was printed")
    found = find_checkpoint(run)
    has_trained = "\niter " in f"\n{output}" or "\nresume " in output
    if found.path is not None:
        try:
            read_algorithm(found.path)
            seen.num_checkpoints[kind] += 1
        except CheckpointError as error:
            problems.append(f"its checkpoint does not load: {error}")
    elif has_trained and kind != "SIGKILL":
        problems.append("it had trained and left no checkpoint")
    if (
        (num := num_iterations(run))
        and found.path is not None
        and kind != "SIGKILL"
        and int(found.path.name) < num
    ):
        problems.append(f"its newest checkpoint is of iteration {int(found.path.name)} of {num}")
    if found.skipped:
        problems.append(f"a torn checkpoint: {found.skipped}")
    seen.codes[kind][code] += 1
    seen.ended_s[kind].append(end - start)
    seen.gone_s[kind].append(gone_s)
    seen.violations += [
        f"{algorithm}, {kind} at {after_s:.2f} s: {problem}\n{output[-1500:]}" for problem in problems
    ]
    log.close()
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(runtime, ignore_errors=True)


def num_iterations(run: Path) -> int:
    """Return the number of iterations that a run has logged."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["training_iteration"]) if lines else 0


def wait_for_python(pid: int) -> None:
    """Wait until the interpreter runs the command: earlier signals go to the shell and the kernel."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except FileNotFoundError:
            return
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)):
            return
        time.sleep(0.005)


def wait_for_training(log: str) -> None:
    """Wait until the first iteration is done."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and "iter 1 " not in Path(log).read_text():
        time.sleep(0.02)


def text(log: object) -> str:
    """Return the output of the run."""
    log.seek(0)  # type: ignore[attr-defined]
    return str(log.read())  # type: ignore[attr-defined]


def quantile(values: list[float], q: float) -> float:
    """Return the quantile `q` (nearest rank)."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> int:
    """End the runs, print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--latest-s",
        type=float,
        default=8.0,
        help="half of the signals come by then, the others in training",
    )
    args = parser.parse_args()
    # `finally` ends the started processes, also if this script is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rng = random.Random(args.seed)
    seen = Figures()
    with tempfile.TemporaryDirectory(prefix="end-") as directory:
        for number in range(args.runs):
            kind = args.kinds[number % len(args.kinds)]
            end_one(kind, number, rng, Path(directory), args.latest_s, seen)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} runs ended, {len(seen.violations)} violations", flush=True)
    for kind, values in seen.ended_s.items():
        gone = seen.gone_s[kind]
        print(
            f"{kind:<14} {len(values):4d} runs, codes {dict(seen.codes[kind])}, "
            f"ended p50 {quantile(values, 0.5):.2f} s p99 {quantile(values, 0.99):.2f} s max {max(values):.2f} s, "
            f"nothing left p50 {quantile(gone, 0.5):.2f} s p99 {quantile(gone, 0.99):.2f} s, "
            f"{seen.num_checkpoints[kind]} left a checkpoint, all load"
        )
    for violation in seen.violations[:10]:
        print(f"BROKEN: {violation}\n")
    print(f"{len(seen.violations)} violations in {args.runs} runs")
    return 1 if seen.violations else 0


if __name__ == "__main__":
    sys.exit(main())
