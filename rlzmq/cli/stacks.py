"""``rlzmq stacks``: the stacks of all threads in the processes of a run on this machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlzmq.actors.process_state import descendants
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.printable import printable
from rlzmq.core.process import find_stack_channel, read_stacks

__all__ = ["StacksOptions", "run"]

_PY_SPY_S = 20.0


@dataclass
class StacksOptions:
    """Options of ``rlzmq stacks``."""

    run: tyro.conf.Positional[Path]
    """The run directory."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq stacks``; return the exit code."""
    options = parse(
        StacksOptions,
        arguments,
        usage="rlzmq stacks RUN",
        description="Show the stacks of all threads of a run's driver, broker, runners and learners on this machine: "
        "by py-spy where it is installed and permitted, else written by the processes themselves.",
    )
    from rlzmq.telemetry.runs import Run

    found = Run.open(options.run)
    host, pid = found.facts.get("host"), found.facts.get("pid")
    if host != platform.node():
        raise ConfigurationError(f"{options.run}: its driver ran on {host}; run rlzmq stacks there.")
    if found.state != "running" or not isinstance(pid, int):
        raise ConfigurationError(f"{options.run}: its driver has ended: there are no stacks.")
    py_spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    for process in (pid, *descendants(pid)):
        channel = find_stack_channel(process)
        if channel is None:  # e.g. the fork server, a tracker, an environment's process, or a script
            continue
        role, file = channel
        print(printable(f"=== {role} (pid {process})"))
        stacks = _by_py_spy(py_spy, process) if py_spy else ""
        try:
            stacks = stacks or read_stacks(process, file)
        except OSError:
            stacks = "it has ended\n"
        print(printable(stacks.rstrip() or "no answer: it is stopped, or swapped out", keep="\n"), end="\n\n")
    return 0


def _by_py_spy(py_spy: str, pid: int) -> str:
    """Return py-spy's stacks; "" if py-spy may not read the process."""
    try:
        done = subprocess.run(
            [py_spy, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
