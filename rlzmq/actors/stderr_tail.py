"""A child's stderr: forward each line with the role in front and control characters escaped; keep the last lines."""

from __future__ import annotations

import os
import select
from collections import deque

from rlzmq.core.printable import printable

__all__ = ["StderrTail"]

_NUM_LINES = 40  # room for a fatal error's stacks and the lines before them
_MAX_LINE_CHARS = 400
_TAIL_BYTES = 8192
_CHUNK_BYTES = 4096  # at most PIPE_BUF: a pipe that polls writable takes this much without blocking


class StderrTail:
    """One child's stderr, or its log file.

    Without a log file the child's stderr is a pipe: :meth:`forward` copies it to this process's stderr
    and keeps the last lines. Forwarding never blocks: while nothing reads this process's stderr, lines
    are only kept. At a terminal, its stdout goes the same way. With a log file the child writes stdout
    and stderr there.

    Args:
        role: Put in front of every line.
        log_path: File to append to, made with mode 0600; None for the pipe.
    """

    def __init__(self, role: str, log_path: str | None) -> None:
        self._role = role
        self._log_path = log_path
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._partial = b""
        self.fd: int | None = None
        self._write_fd: int | None = None
        if log_path is None:
            self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self.fd, False)

    def become_stderr(self) -> None:
        """Make the pipe this process's stderr, or the log file its stdout and stderr; call it in the child."""
        if self._write_fd is not None:
            if os.isatty(1) and os.isatty(2):  # what it prints for the terminal is escaped, too
                os.dup2(self._write_fd, 1)
            os.dup2(self._write_fd, 2)
        elif self._log_path is not None:
            fd = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
        self.close()

    def forward(self) -> bool:
        """Forward what has arrived; return False at the end of the stream."""
        assert self.fd is not None
        try:
            data = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        if data:
            self._take(data)
        return bool(data)

    def drain(self) -> None:
        """Forward everything that is left after the child's end."""
        while self.fd is not None:
            try:
                data = os.read(self.fd, _CHUNK_BYTES)
            except BlockingIOError:
                break  # a grandchild still holds the other end
            if not data:
                break
            self._take(data)
        if self._partial:
            self._take(b"\n")

    def lines(self) -> list[str]:
        """Return the last lines, oldest first."""
        if self._log_path is not None:
            try:
                with open(self._log_path, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                    for line in file.read(_TAIL_BYTES).splitlines():
                        self._keep(line)
            except OSError:
                pass
        return list(self._lines)

    def close_write_end(self) -> None:
        """Close the write end; call it in the server after the fork."""
        if self._write_fd is not None:
            os.close(self._write_fd)
            self._write_fd = None

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self.close_write_end()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _take(self, data: bytes) -> None:
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _TAIL_BYTES:
            whole.append(self._partial)
            self._partial = b""
        for line in whole:
            _write_if_ready(f"[{self._role}] {self._keep(line)}\n".encode())

    def _keep(self, line: bytes) -> str:
        """Keep the beginning of a line; return what may be shown of it: its end after a progress bar's CRs."""
        shown = printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace"), keep="\t")
        self._lines.append(shown[:_MAX_LINE_CHARS])
        return shown


def _write_if_ready(data: bytes) -> None:
    for start in range(0, len(data), _CHUNK_BYTES):
        try:
            if not select.select([], [2], [], 0)[1]:
                return
            os.write(2, data[start : start + _CHUNK_BYTES])
        except (OSError, ValueError):  # stderr is closed
            return
