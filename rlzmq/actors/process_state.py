"""Process states read from the kernel: stopped processes, process families, and how to end a family."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from rlzmq.core.machine import boot_id

__all__ = ["FORK_SERVER_NAME", "descendants", "end_family", "is_stopped", "start_mark"]

FORK_SERVER_NAME = "rlzmq-forks"
"""The process name of a fork server (at most 15 characters); its children have the same command line."""

_MAX_ROUNDS = 100
_TRACKER = b"multiprocessing.resource_tracker"


class _Process(NamedTuple):
    pid: int
    name: str
    state: str
    parent: int
    group: int
    started: str  # in clock ticks since the machine's start


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (a debugger's stop does not count)."""
    process = _read(pid)
    return process is not None and process.state == "T"


def start_mark(pid: int) -> str | None:
    """Return a text that only this process has among all that ever have its number; None if it does not exist."""
    process = _read(pid)
    if process is None:
        return None
    return f"{boot_id()} {process.started}"


def descendants(pid: int) -> list[int]:
    """Return the numbers of a process's children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process.pid)
    found = list(children.get(pid, ()))
    for child in found:  # grows during the loop
        found += children.get(child, ())
    return found


def end_family(group: int, *, parent: int = 0, spared: Container[int] = ()) -> None:
    """Kill the processes that an ended process left behind.

    Processes that clean up after others and then end by themselves are spared: resource trackers of
    `multiprocessing` (semaphores, shared memory), and fork servers (their children and directories).

    Args:
        group: Process group whose members are killed.
        parent: A process whose children are killed as well, in any group or session; 0: none.
        spared: Children of `parent` that are not killed.
    """
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):  # killed processes may have started others
        found = [
            process.pid
            for process in _processes()
            if (process.group == group or (parent and process.parent == parent and process.pid not in spared))
            and process.state not in "ZX"
            and process.pid not in killed
            and not (process.name == FORK_SERVER_NAME or _is_tracker(process.pid))
        ]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)


def _processes() -> Iterator[_Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := _read(int(name))) is not None:
            yield process


def _read(pid: int) -> _Process | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = status.partition("(")[2].rpartition(")")
    fields = rest.split()  # the third of proc_pid_stat(5) and those after it
    return _Process(pid, name, fields[0], int(fields[1]), int(fields[2]), fields[19])


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
