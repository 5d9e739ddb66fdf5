"""The exit status of an actor's process, and the error that its callers get."""

from __future__ import annotations

import json
import signal
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from rlzmq.core.errors import PeerLostError
from rlzmq.core.last_words import LastWords

__all__ = ["MAX_REPORT_BYTES", "ActorLostError", "ExitStatus", "exit_report"]

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
