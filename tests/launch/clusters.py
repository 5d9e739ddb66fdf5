"""Cluster files for namespaces, and ``rlzmq launch`` as a process in one of them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.machines import SSH_PORT, Machine, Machines

__all__ = ["Launch", "cluster_text", "launched"]

PORT = 5555
RUNNER, LEARNER = (f"{sys.executable} -m rlzmq {role}" for role in ("runner", "learner"))
_TRAIN = (
    "ppo", "--env", "CartPole-v1", "--env-runners", "0", "--envs-per-env-runner", "4", "--preset", "none",
    "--batch-size-per-learner", "200", "--minibatch-size", "50", "--num-epochs", "1",
)  # fmt: skip


def cluster_text(
    machines: Machines,
    *,
    head: str = "",
    runners: Sequence[tuple[int, int]] = ((1, 1),),
    learners: Sequence[tuple[int, int]] = (),
    train: Sequence[str] = (),
    **more: Any,
) -> str:
    """A cluster file; ``runners`` and ``learners`` are (machine, count)."""
    settings: dict[str, Any] = {
        "head": head or machines[0].address,
        "listen": f"tcp://{machines[0].address}:{PORT}",
        "train": [*_TRAIN, "--run-dir", str(machines.directory / "run"), *train],
        "python": sys.executable,
        "workdir": str(machines.directory),
        "user": "root",
        "port": SSH_PORT,
        "key": str(machines.directory / "client_key"),
        "known_hosts": str(machines.directory / "known_hosts"),
        **more,
    }
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    for role, places in (("runners", runners), ("learners", learners)):
        for number, count in places:
            lines += [f"[[{role}]]", f"host = {machines[number].address!r}", f"count = {count}"]
    return "\n".join(lines) + "\n"


class Launch:
    """``rlzmq launch cluster.toml`` on a machine.

    Attributes:
        output: All lines so far.
    """

    def __init__(self, machine: Machine, text: str) -> None:
        file = machine.directory / "cluster.toml"
        file.write_text(text)
        self.process = machine.popen(
            [sys.executable, "-m", "rlzmq", "launch", str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.output: list[str] = []
        self._rest = b""

    def wait_for(self, pattern: str, *, count: int = 1, after: int = 0, timeout_s: float = 60.0) -> int:
        """Read until `count` lines from line `after` on match: the number of lines then."""
        return self.wait_until(
            lambda: sum(bool(re.search(pattern, line)) for line in self.output[after:]) >= count,
            f"{count} × {pattern!r}",
            timeout_s,
        )

    def wait_until(self, is_true: Callable[[], bool], what: str, timeout_s: float = 60.0) -> int:
        """Read until `is_true()`: the number of lines then."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if not self._read(deadline - time.monotonic()):
                lines = [line for line in self.output if not re.match(r"\[head\] iter \d+\d", line)]
                raise AssertionError(f"no {what} in:\n" + "\n".join(lines[-60:]))
        return len(self.output)

    def _read(self, timeout_s: float) -> bool:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        ready, _, _ = select.select([fd], [], [], max(0.0, timeout_s))
        chunk = os.read(fd, 1 << 16) if ready else b""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self.output += [line.decode(errors="replace") for line in lines]
        return bool(chunk)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for its end: the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(timeout=max(0.1, deadline - time.monotonic()))


@contextlib.contextmanager
def launched(machine: Machine, text: str) -> Iterator[Launch]:
    """A `Launch` that is killed at the end, whatever happens."""
    launch = Launch(machine, text)
    try:
        yield launch
    finally:
        if launch.process.poll() is None:
            launch.process.kill()
        launch.process.communicate()


def join_directories(directory: Path) -> list[Path]:
    """Directories with keys that launchers left behind."""
    return [path.parent for path in directory.rglob("*.toml") if path.name.startswith("join")]
