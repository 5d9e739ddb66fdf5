"""Process states read from the kernel: stopped processes, process families, and how to end a family."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import textwrap
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlzmq.core.errors import PeerLostError
from rlzmq.core.process import LastWords, OpenedProcess

__all__ = [
    "FORK_SERVER_NAME",
    "MAX_REPORT_BYTES",
    "ActorLostError",
    "ExitStatus",
    "descendants",
    "end_family",
    "exit_report",
    "is_stopped",
]


FORK_SERVER_NAME = "rlzmq-forks"
"""The process name of a fork server (at most 15 characters); its children have the same command line."""

_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
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
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name is cut after 15 bytes
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


MAX_REPORT_BYTES = 128 * 1024
"""Size of the largest report as JSON: less than a Unix socket takes at once."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended.

    Attributes:
        exit_code: Its exit code, None when a signal ended it or nobody knows.
        signal_number: The signal that ended it, None otherwise.
        stderr_lines: The last lines on its stderr, of whatever it had started, too.
        last_words: Why it ended itself; None if a signal or foreign code ended it.
    """

    exit_code: int | None
    signal_number: int | None = None
    stderr_lines: tuple[str, ...] = ()
    last_words: LastWords | None = None

    @classmethod
    def from_report(cls, report: dict[str, Any]) -> ExitStatus:
        """Convert a report of `exit_report`."""
        code, words = report["exit"], report["last_words"]
        exit_code, signal_number = (None, -code) if code < 0 else (code, None)
        last_words = None if words is None else LastWords(**words)
        return cls(exit_code, signal_number, tuple(report["stderr"]), last_words)

    @property
    def is_crash(self) -> bool:
        """Whether code that is not rlzmq's ended it (a fault in a native library, `os._exit`), and so may again."""
        if self.signal_number is not None:
            return self.signal_number in _FAULTS
        exits = self.last_words is None or self.last_words.kind == SystemExit.__name__
        return self.exit_code is not None and exits

    @property
    def explanation(self) -> str:
        """What follows the fact that it ended: its last words, else the end of its stderr; may be ""."""
        if self.last_words is not None:
            return f"\nIts last words:\n{textwrap.indent(str(self.last_words), '  ')}"
        if self.stderr_lines:
            return "\nIts last stderr lines:\n" + "\n".join(f"  {line}" for line in self.stderr_lines)
        return ""

    def __str__(self) -> str:
        if self.signal_number is not None:
            try:
                name = signal.Signals(self.signal_number).name
            except ValueError:
                name = "unknown"
            return f"killed by signal {self.signal_number} ({name})"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        return "ended together with the fork server"


def exit_report(code: int, stderr_lines: list[str], last_words: LastWords | None) -> dict[str, Any]:
    """Return the fork server's report of an exit, with as many of the last lines as one message carries.

    Args:
        code: Return code as in ``subprocess``: a negative one is a signal.
        stderr_lines: The last lines, oldest first.
        last_words: The process's own last words.
    """
    words = None if last_words is None else asdict(last_words)
    report = {"exit": code, "stderr": stderr_lines, "last_words": words}
    while stderr_lines and len(json.dumps(report)) > MAX_REPORT_BYTES:
        del stderr_lines[: len(stderr_lines) // 4 or 1]
    return report


class ActorLostError(PeerLostError):
    """An actor's process ended while a call needed it.

    Attributes:
        role: The actor's name.
        pid: Its process id.
        exit_status: How it ended.
    """

    def __init__(
        self, message: str, *, role: str = "", pid: int = 0, exit_status: ExitStatus | None = None
    ) -> None:
        super().__init__(message)
        self.role = role
        self.pid = pid
        self.exit_status = exit_status

    @classmethod
    def describe(
        cls, role: str, class_name: str, pid: int, status: ExitStatus, during: str, why_killed: str = ""
    ) -> ActorLostError:
        """Return the error for callers: the actor, its exit status, the call and the explanation."""
        text = f"actor {role!r} ({class_name}, pid {pid}) {why_killed or status} during {during}"
        if status.signal_number == signal.SIGKILL and not why_killed:
            text += "; if nobody here killed it, the machine may have run out of memory"
        return cls(text + status.explanation, role=role, pid=pid, exit_status=status)
