"""Process states read from the kernel: stopped processes, process families, and how to end a family."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from rlzmq.core.opened_process import OpenedProcess

__all__ = ["FORK_SERVER_NAME", "descendants", "end_family", "is_stopped"]

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
    session: int


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (a debugger's stop does not count)."""
    process = _read(pid)
    return process is not None and process.state == "T"


def descendants(pid: int) -> list[int]:
    """Return the numbers of a process's children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process.pid)
    found = list(children.get(pid, ()))
    for child in found:  # grows during the loop
        found += children.get(child, ())
    return found


def end_family(group: int, session: int, *, parent: int = 0, spared: Container[int] = ()) -> None:
    """Kill the processes that an ended process left behind.

    Processes that clean up after others and then end by themselves are spared: resource trackers of
    `multiprocessing` (semaphores, shared memory), and fork servers (their children and directories).

    Args:
        group: Process group whose members are killed.
        session: The group's session: once the last member has ended, another session may have a group of this number.
        parent: A process whose children are killed as well, in any group or session; 0: none.
        spared: Children of `parent` that are not killed.
    """

    def is_left(process: _Process) -> bool:
        is_member = (process.group, process.session) == (group, session)
        is_child = parent != 0 and process.parent == parent and process.pid not in spared
        return (is_member or is_child) and process.state not in "ZX" and process.name != FORK_SERVER_NAME

    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):  # killed processes may have started others
        found = {process.pid for process in _processes() if is_left(process)} - killed
        found = {pid for pid in found if not _is_tracker(pid)}
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError), OpenedProcess(pid) as opened:
                process = _read(pid)  # now that it is opened: the number may have become another process's
                if process is not None and is_left(process):
                    opened.send_signal(signal.SIGKILL)
        killed |= found


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
    return _Process(pid, name, fields[0], *map(int, fields[1:4]))


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
