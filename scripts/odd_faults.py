"""Faults other than dying processes: a full disk, a clock that jumps, a leak, a crowd, an overload, strangers.

    python scripts/odd_faults.py                    # every case
    python scripts/odd_faults.py disk clock         # these
    python scripts/odd_faults.py crowd --runners 64 --seconds 180

Each case starts a separate run, causes one fault, and prints the results: the longest time without an iteration
during it, and how the run ended. A run may end with an error, but must not pause for longer than 15 s, miscount its
env steps, or leave processes. Exit code 1: one did.

`disk` and `shm` mount file systems in a separate mount namespace (root; skipped elsewhere), `clock` preloads a
library compiled with gcc: nothing outside of the runs is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STAND_STILL_S = 15.0
UPDATES = [
    "--envs-per-env-runner", "4", "--batch-size-per-learner", "240", "--minibatch-size", "60", "--num-epochs", "2",
]  # fmt: skip

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *offset;
static int (*real_clock)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
    int fd = open(getenv("ODD_CLOCK"), O_RDONLY);
    real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    offset = fd < 0 ? 0 : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
}
int clock_gettime(clockid_t id, struct timespec *to) {
    if (!real_clock) real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real_clock(id, to);
    if (!code && id == CLOCK_REALTIME && offset) to->tv_sec += *offset;
    return code;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


# ---------------------------------------------------------------------- environments


class Leaks(gym.Env[np.ndarray, int]):
    """Leaks a number of bytes with each step."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    bytes_per_step = 100 << 20

    def __init__(self, **_: Any) -> None:
        self._held: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> Any:
        self._held.append(np.ones(self.bytes_per_step, np.uint8))
        return np.zeros(4, np.float32), 0.0, False, len(self._held) % 50 == 0, {}


class Sleeps(Leaks):
    """Takes 20 ms per step, without using the processor."""

    bytes_per_step = 0

    def step(self, action: int) -> Any:
        time.sleep(0.02)
        return super().step(action)


class Spins(Leaks):
    """Takes 2 ms of the processor per step."""

    bytes_per_step = 0

    def step(self, action: int) -> Any:
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass
        return super().step(action)


# ---------------------------------------------------------------------- runs


class Run:
    """``rlzmq train`` in a child process.

    Args:
        place: Directory for its log, sockets and, unless `run_dir` is set, its run directory.
        arguments: Arguments of the command.
        wrap: A command that starts it.
        environment: Variables added to this process's environment.
        run_dir: Its run directory.
    """

    def __init__(
        self,
        place: Path,
        *arguments: str,
        wrap: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        run_dir: Path | None = None,
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir or place / "run"
        self._log = (place / "log").open("ab")
        self.log_path = place / "log"
        command = [
            *wrap, sys.executable, "-m", "rlzmq", "train", "ppo", "--preset", "none", *UPDATES,
            "--run-dir", str(self.run_dir), *arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True, cwd=place,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
                "XDG_RUNTIME_DIR": str(place), **(environment or {}),
            },
        )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def iterations(self) -> int:
        """The number of iterations printed."""
        return self.output.count("\niter ") + self.output.startswith("iter ")

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float = 90.0) -> bool:
        """Wait until it is true, the process has ended, or the time is up; return whether it is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if is_true():
                return True
            if self.process.poll() is not None:
                return is_true()
            time.sleep(0.05)
        return False

    def trains(self, more: int = 3, timeout_s: float = 90.0) -> bool:
        """Return whether it completes this number of further iterations."""
        before = self.iterations
        return self.wait_for(lambda: self.iterations >= before + more, timeout_s)

    def longest_pause(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Return the longest time without an iteration, within these seconds (or until the run has ended)."""
        begin = last = time.monotonic()
        count, longest = self.iterations, 0.0
        while time.monotonic() < begin + seconds and self.process.poll() is None:
            meanwhile()
            time.sleep(0.05)
            now = self.iterations
            if now > count:
                count, last = now, time.monotonic()
            longest = max(longest, time.monotonic() - last)
        return longest

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def forked(self) -> list[psutil.Process]:
        """Return its runners, learners and broker, the children of its fork server."""
        return [process for process in self.children() if process.ppid() != self.process.pid]

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int | None:
        """Send this signal and return the exit code; None if the run did not end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        for process in self.children():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.kill()
        self.process.wait()
        self._log.close()

    def account(self) -> str:
        """Return the error of the account in the newest result; "" if it balances."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        whole = [line for line in lines if line.endswith("}")]
        if not whole:
            return ""
        account = json.loads(whole[-1])["accounting"]
        settled = account["trained"] + sum(account["dropped"].values()) + account["pending"]
        return "" if account["sampled"] == settled else f"the account does not add up: {account}"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class Seen:
    """Results of the cases."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def fact(self, case: str, text: str) -> None:
        print(f"{case:<10} {text}", flush=True)

    def expect(self, case: str, is_true: bool, text: str, run: Run | None = None) -> None:
        if not is_true:
            tail = f"\n{run.output[-2500:]}" if run is not None else ""
            self.problems.append(f"{case}: {text}{tail}")
            print(f"{case:<10} BROKEN: {text}{tail}", flush=True)

    def ends_well(self, case: str, run: Run, code: int = 75) -> None:
        """Check that SIGTERM ends the run with the usual exit code, and its account balances."""
        got = run.end()
        self.expect(case, got == code, f"exit code {got}, expected {code}", run)
        wrong = run.account()
        self.expect(case, not wrong, wrong, run)


CARTPOLE = ["--env", "CartPole-v1", "--env-runners", "2", "--learners", "2"]


# ---------------------------------------------------------------------- cases


def disk(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Fill the run directory's file system for some seconds, at random times."""
    disk_at = place / "disk"
    disk_at.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk_at)], check=True)
    rng = random.Random(options.seed)
    try:
        with Run(place, *CARTPOLE, "--checkpoint-every-s", "0.3", run_dir=disk_at / "run") as run:
            seen.expect("disk", run.trains(), "it does not begin", run)
            pauses = []
            for _ in range(5):
                run.longest_pause(rng.uniform(0.0, 2.0))
                _fill(disk_at / "filler")
                pauses.append(run.longest_pause(4.0))
                (disk_at / "filler").unlink()
            seen.expect("disk", run.trains(), "it does not go on once there is room", run)
            seen.expect("disk", max(pauses) < STAND_STILL_S, f"it stood still for {max(pauses):.1f} s", run)
            failed = run.output.count("Cannot write a checkpoint")
            seen.ends_well("disk", run)
            seen.fact(
                "disk", f"full 5 times for 4 s: longest pause {max(pauses):.1f} s, {failed} lines about it"
            )
            from rlzmq.core.run_dir import find_checkpoint

            found = find_checkpoint(run.run_dir)
            seen.expect("disk", found.path is not None, "no whole checkpoint is left", run)
    finally:
        subprocess.run(["umount", "-l", str(disk_at)], check=False)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def shm(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Train with a full ``/dev/shm``."""
    full = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full; exec "$@"'
    for mode in ("sync", "async"):
        arguments = [*CARTPOLE, "--gym-env-vectorize-mode", mode]
        with Run(place / mode, *arguments, wrap=["unshare", "-m", "sh", "-c", full, "sh"]) as run:
            begun = run.trains(timeout_s=60)
            code = run.end()
            said = next((line for line in run.output.splitlines() if "rror" in line), "no error")
            seen.expect("shm", begun or code is not None, "it stands still", run)
            seen.fact(
                "shm", f"{mode}: " + (f"trains, exit {code}" if begun else f"exit {code}: {said[:160]}")
            )


def clock(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Make the wall clock of all the run's processes jump an hour forward and back, ten times."""
    library, offset = place / "clock.so", place / "offset"
    place.mkdir(parents=True)
    (place / "clock.c").write_text(CLOCK)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(place / "clock.c"), "-ldl"], check=True
    )
    offset.write_bytes(struct.pack("l", 0))
    rng = random.Random(options.seed)
    environment = {"LD_PRELOAD": str(library), "ODD_CLOCK": str(offset)}
    with Run(place, *CARTPOLE, "--checkpoint-every-s", "0.5", environment=environment) as run:
        seen.expect("clock", run.trains(), "it does not begin", run)
        pauses = []
        for number in range(10):
            with offset.open("r+b") as file:
                file.write(struct.pack("l", (3600, -3600, 0)[number % 3]))
            if number % 4 == 3:  # and one of its processes dies at the same time
                rng.choice(run.forked()).kill()
            pauses.append(run.longest_pause(rng.uniform(1.0, 3.0)))
        seen.expect("clock", run.trains(), "it does not go on", run)
        seen.expect("clock", max(pauses) < STAND_STILL_S, f"it stood still for {max(pauses):.1f} s", run)
        seen.ends_well("clock", run)
        seen.fact("clock", f"10 jumps of an hour, 2 deaths among them: longest pause {max(pauses):.1f} s")


def leak(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Train with an env that leaks 100 MB per step; its runner has a limit of 1 GiB."""
    arguments = ["--env", "odd_faults:Leaks", "--env-runners", "1", "--learners", "1"]
    limit = ["--env-runner-memory-limit-bytes", str(1 << 30)]
    with Run(place, *arguments, *limit) as run:
        largest = 0

        def look() -> None:
            nonlocal largest
            for process in run.children():
                try:
                    largest = max(largest, process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue

        run.longest_pause(40.0, look)
        code = run.process.poll()
        seen.expect("leak", largest < 3 << 29, f"a process had {largest >> 20} MiB")
        seen.expect("leak", "OOM: " in run.output, "nobody says what happened", run)
        ended = (
            f"exit {code}" if code is not None else f"goes on, {run.iterations} iterations; ends by SIGTERM"
        )
        if code is None:
            code = run.end()
            seen.expect("leak", code is not None, "it does not end", run)
        deaths = run.output.count("OOM: ")
        last = run.output.strip().splitlines()[-1][:160]
        seen.fact(
            "leak",
            f"largest process {largest >> 20} MiB, {deaths} restarts by the limit, {ended}; says: {last}",
        )


def forkserver(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Kill the process that all others are forked from, at a random moment."""
    rng = random.Random(options.seed)
    started_s = 10.0
    for number, latest_s in enumerate((0.5, 2.0, 4.0)):
        start = time.monotonic()
        with Run(place / str(number), *CARTPOLE) as run:
            if number:
                run.trains(1)
                started_s = max(started_s, time.monotonic() - start)
            else:
                run.wait_for(lambda: bool(run.children()))
            time.sleep(rng.uniform(0.0, latest_s))
            for process in run.children():
                if process.ppid() == run.process.pid:
                    process.kill()
            limit_s = 2 * started_s + STAND_STILL_S  # all processes are restarted
            begin = time.monotonic()
            goes_on = run.trains(3, limit_s)
            pause = time.monotonic() - begin
            code = run.process.poll()
            seen.expect("forkserver", goes_on or code is not None, f"it stood still for {pause:.1f} s", run)
            if code is None:
                code = run.end()
            last = (run.output.strip().splitlines() or ["nothing"])[-1][:160]
            seen.fact("forkserver", f"killed: 3 updates more after {pause:.1f} s, exit {code}; says: {last}")


def numbers(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Resume a checkpoint with other numbers of runners, learners and envs."""
    shapes = [("2", "2", "4"), ("1", "1", "1"), ("3", "1", "8"), ("0", "0", "2"), ("1", "2", "3")]
    for runners, learners, envs in shapes:
        arguments = [
            "--env",
            "CartPole-v1",
            "--env-runners",
            runners,
            "--learners",
            learners,
            "--resume",
            "auto",
        ]
        before = _trained(place / "run")
        with Run(place, *arguments, "--envs-per-env-runner", envs, "--checkpoint-every-s", "0.5") as run:
            seen.expect("numbers", run.trains(), f"{runners} runners, {learners} learners, {envs} envs", run)
            seen.ends_well("numbers", run)
            seen.expect(
                "numbers", _trained(run.run_dir) > before, "the count of trained steps went back", run
            )
    seen.fact("numbers", f"{len(shapes)} shapes, one after the other from the same checkpoints")


def _trained(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return int(json.loads(lines[-1])["num_env_steps_sampled_lifetime"]) if lines else 0


def _free_port() -> int:
    """Return the first of three consecutive free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = int(server.getsockname()[1])
        try:
            for number in range(1, 4):
                socket.create_server(("127.0.0.1", port + number)).close()
        except OSError:
            continue
        return port


def network(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Train with a runner behind 100 ms of latency, 1 % of its packets lost (sent again 0.3 s later), with CURVE."""
    from rlzmq.core.addresses import split_tcp
    from rlzmq.net.keys import JoinFile

    place.mkdir(parents=True)
    port, join_path = _free_port(), place / "join.toml"
    arguments = [
        "--env",
        "CartPole-v1",
        "--env-runners",
        "0",
        "--learners",
        "1",
        "--join-file",
        str(join_path),
    ]
    with Run(place, *arguments, "--listen", f"tcp://127.0.0.1:{port}") as run:
        run.wait_for(join_path.exists, 60.0)
        join = JoinFile.read(join_path)
        for delay_s, loss in ((0.0, 0.0), (0.05, 0.01)):
            upstreams = [split_tcp(address) for address in join.addresses.values()]
            with _Lines(upstreams, delay_s, loss, options.seed) as lines:
                ports = dict(zip(join.addresses, lines.ports, strict=True))
                addresses = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
                away = place / f"join-{delay_s:g}.toml"
                JoinFile(**{**_fields(join), "addresses": addresses}).write(away)
                runner = _start("runner", "--join", str(away), cwd=place)
                try:
                    name = f"{2e3 * delay_s:.0f} ms there and back, {loss:.0%} lost"
                    seen.expect("network", run.trains(3, 60.0), f"no updates at {name}", run)
                    count, pause = run.iterations, run.longest_pause(15.0)
                    rate = (run.iterations - count) / 15.0
                    seen.expect("network", pause < STAND_STILL_S, f"it stood still for {pause:.1f} s", run)
                    seen.fact(
                        "network",
                        f"{name} ({lines.num_lost} packets): {rate:.1f} updates/s, longest pause {pause:.1f} s",
                    )
                finally:
                    runner.terminate()
                    runner.wait(30)
        seen.ends_well("network", run)


def _start(*arguments: str, cwd: Path, output: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a peer that joins; its output goes to a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    with Path(output or os.devnull).open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "rlzmq", *arguments], cwd=cwd, stdout=out, stderr=out, env=environment
        )


def _fields(join: Any) -> dict[str, Any]:
    return {name: getattr(join, name) for name in type(join).__dataclass_fields__}


class _Lines:
    """Proxies to some addresses, on a thread, with latency and occasional longer delays."""

    def __init__(self, upstreams: list[tuple[str, int]], delay_s: float, loss: float, seed: int) -> None:
        self._upstreams = upstreams
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lines")
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self.num_lost = 0
        self.ports: list[int] = []

    def __enter__(self) -> _Lines:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        for upstream in self._upstreams:
            server = await asyncio.start_server(functools.partial(self._serve, upstream), "127.0.0.1", 0)
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, upstream: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there_reader, there_writer = await asyncio.open_connection(*upstream)
        for source, to in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._carry(source, to))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        try:
            while data := await reader.read(1400):
                late_s = self._delay_s
                if self._random.random() < self._loss:
                    self.num_lost += 1
                    late_s += 0.3
                due = max(due + 1e-6, loop.time() + late_s)  # data after a lost packet waits for it
                loop.call_at(due, writer.write, data)
            loop.call_at(max(due, loop.time()), writer.close)
        except (OSError, asyncio.CancelledError):
            writer.close()


def crowd(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Let runner processes with a sleeping env join, leave and die at random.

    As many start at a time as there are cores: starting one costs seconds of processor time, and a machine that only
    imports would not test the run.
    """
    place.mkdir(parents=True)
    rng = random.Random(options.seed)
    join_path = place / "join.toml"
    arguments = [
        "--env", "odd_faults:Sleeps", "--env-runners", "0", "--learners", "1", "--join-file", str(join_path),
        "--listen", f"tcp://127.0.0.1:{_free_port()}", "--import", "odd_faults",
    ]  # fmt: skip
    counts = {"joined": 0, "left": 0, "killed": 0}
    runners: list[subprocess.Popen[bytes]] = []
    outputs: dict[int, Path] = {}

    def may_start() -> bool:
        starting = [
            runner
            for runner in runners
            if runner.poll() is None and b" joined " not in outputs[runner.pid].read_bytes()
        ]
        return len(starting) < (os.cpu_count() or 1)

    def join() -> None:
        output = place / f"runner-{counts['joined']}.log"
        arguments = ("runner", "--join", str(join_path), "--import", "odd_faults")
        runners.append(_start(*arguments, cwd=place, output=output))
        outputs[runners[-1].pid] = output
        counts["joined"] += 1

    def change() -> None:
        runners[:] = [runner for runner in runners if runner.poll() is None]
        if rng.random() > 0.05:
            return
        if len(runners) < options.runners and (rng.random() < 0.7 or len(runners) < 2):
            if may_start():
                join()
        elif runners:
            how = rng.choice(["left", "killed"])
            rng.choice(runners).send_signal(signal.SIGTERM if how == "left" else signal.SIGKILL)
            counts[how] += 1

    with Run(place, *arguments) as run:
        try:
            run.wait_for(join_path.exists, 60.0)
            for _ in range(options.runners):
                run.wait_for(may_start, 60.0)
                join()
            seen.expect("crowd", run.trains(timeout_s=240.0), "it does not begin", run)
            count, pause = run.iterations, run.longest_pause(options.seconds, change)
            seen.expect("crowd", pause < STAND_STILL_S, f"it stood still for {pause:.1f} s", run)
            seen.fact(
                "crowd",
                f"{counts}, {run.iterations - count} updates in {options.seconds:g} s, longest pause {pause:.1f} s",
            )
            seen.ends_well("crowd", run)
        finally:
            for runner in runners:
                runner.kill()
                runner.wait()


def overload(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Many local runners that all need a core: nobody who is healthy is killed."""
    place.mkdir(parents=True)
    arguments = ["--env", "odd_faults:Spins", "--env-runners", str(options.overload), "--learners", "1",
                 "--batch-size-per-learner", "12800", "--minibatch-size", "6400"]  # fmt: skip
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.hogs)]
    try:
        with Run(place, *arguments) as run:
            seen.expect("overload", run.trains(1, timeout_s=150.0), "it does not begin", run)
            count, pause = run.iterations, run.longest_pause(options.seconds)
            killed = [line for line in run.output.splitlines() if "Killing it" in line or "is killed" in line]
            seen.expect("overload", not killed, f"{len(killed)} were killed: " + "; ".join(killed[:5]), run)
            text = f"{run.iterations - count} updates in {options.seconds:g} s, longest pause {pause:.1f} s"
            seen.fact("overload", f"{options.overload} runners, {len(killed)} killed; {text}")
            seen.ends_well("overload", run)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def store(place: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Strangers at the learners' store: garbage, silence, claims of gigabytes, hang-ups."""
    place.mkdir(parents=True)
    rng = random.Random(options.seed)
    code = (
        "import sys, time; from rlzmq.driver.formation import StoreServer; s = StoreServer('127.0.0.1', 0); "
        "print(s.port, flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdin is not None
    port = int(server.stdout.readline())
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    kinds = [
        lambda: rng.randbytes(512),
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: b"",
        lambda: bytes([rng.randrange(16)]) + struct.pack("<Q", 1 << 40),
        lambda: (
            struct.pack("<BIB", 0, 0x3C85F7CE, rng.randrange(16)) + struct.pack("<Q", 1 << 40) + b"x" * 100
        ),
    ]
    held = []
    for number in range(500):
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=2.0)
            connection.sendall(kinds[number % len(kinds)]())
        except OSError:
            continue
        held.append(connection)
        if len(held) > 50:
            held.pop(rng.randrange(len(held))).close()
    works = subprocess.run(
        [
            sys.executable, "-c",
            "from rlzmq.roles.learner_role import open_store; import sys; s = open_store(sys.argv[1], 1); "
            "s.set('a', 'b'); assert s.get('a') == b'b'", f"tcp://127.0.0.1:{port}",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60, check=False,
    ).returncode == 0  # fmt: skip
    alive = server.poll() is None
    grown = (process.memory_info().rss - before) >> 20 if alive else 0
    for connection in held:
        connection.close()
    server.stdin.close()
    server.wait(20)
    seen.expect("store", alive and works, f"alive {alive}, serves learners {works}")
    seen.expect("store", grown < 256, f"{grown} MiB more")
    seen.fact("store", f"500 strangers: alive {alive}, serves learners {works}, {grown} MiB more")


CASES: dict[str, Callable[[Path, argparse.Namespace, Seen], None]] = {
    case.__name__: case
    for case in (disk, shm, clock, leak, forkserver, numbers, network, crowd, overload, store)
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runners", type=int, default=64, help="of crowd (default: 64)")
    parser.add_argument("--overload", type=int, default=128, help="runners of overload (default: 128)")
    parser.add_argument(
        "--hogs", type=int, default=0, help="of overload: other processes that want a core each"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="of crowd and overload (default: 180)")
    options = parser.parse_args()
    # `finally` ends what was started, also where this script is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seen = Seen()
    for name in options.cases or CASES:
        if name in ("disk", "shm") and (os.geteuid() != 0 or shutil.which("unshare") is None):
            seen.fact(name, "skipped: it needs root, to mount file systems of its own")
            continue
        with tempfile.TemporaryDirectory(prefix="odd-") as directory:
            CASES[name](Path(directory) / name, options, seen)
    print(f"{len(seen.problems)} broken")
    return int(bool(seen.problems))


if __name__ == "__main__":
    raise SystemExit(main())
