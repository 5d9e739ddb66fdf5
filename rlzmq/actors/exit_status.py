"""The exit status of an actor's process, and the error that its callers get."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from rlzmq.core.errors import PeerLostError

__all__ = ["ActorLostError", "ExitStatus"]


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended.

    Attributes:
        exit_code: Its exit code, None when a signal ended it or nobody knows.
        signal_number: The signal that ended it, None otherwise.
        stderr_lines: The last lines it wrote to stderr.
    """

    exit_code: int | None
    signal_number: int | None = None
    stderr_lines: tuple[str, ...] = ()

    @classmethod
    def from_return_code(cls, code: int, stderr_lines: tuple[str, ...] = ()) -> ExitStatus:
        """Convert a return code of ``subprocess``: a negative one is a signal."""
        return cls(None, -code, stderr_lines) if code < 0 else cls(code, None, stderr_lines)

    @property
    def is_clean(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0

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
        cls, role: str, class_name: str, pid: int, status: ExitStatus, during: str
    ) -> ActorLostError:
        """Return the error for callers: the actor, its exit status, the call and the last stderr lines."""
        text = f"actor {role!r} ({class_name}, pid {pid}) {status} during {during}"
        if status.signal_number == signal.SIGKILL:
            text += "; if nobody here killed it, the machine may have run out of memory"
        if status.stderr_lines:
            text += "\nits last stderr lines:\n" + "\n".join(f"  {line}" for line in status.stderr_lines)
        return cls(text, role=role, pid=pid, exit_status=status)
