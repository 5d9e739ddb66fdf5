"""The fork server's process: imports what actors need once, then forks one child per request.

It has a single thread, no event loop and no zmq context, and never runs a torch operation, so its
forks are safe. It communicates with the process that started it (the *driver*) over inherited sockets only:

* control socket: requests ``spawn``, ``preload`` (more modules), ``own`` (a directory to remove when the driver
  dies), ``disown``;
* one status socket per child: to the driver ``{"pid"}`` then ``{"exit", "stderr", "last_words"}``; from the driver
  ``{"signal"}``; when the driver closes it, the child is killed.

When the driver ends, however it ends, every child is killed and owned directories are removed. A child's own
descendants end with it, also those in sessions or groups of their own: each child, and this process above it, adopts
orphans (PR_SET_CHILD_SUBREAPER), so whoever is adopted here has lost the child that it belonged to.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlzmq.actors.process_state import FORK_SERVER_NAME, end_family, exit_report
from rlzmq.core.errors import printable
from rlzmq.core.process import (
    LastWords,
    ignore_ending_signals,
    leave_words,
    make_words_channel,
    open_words_channel,
    read_words,
)

__all__ = ["main"]


_NUM_LINES = 40  # room for a fatal error's stacks and the lines before them
_MAX_LINE_CHARS = 400
_TAIL_BYTES = 8192
_CHUNK_BYTES = 4096  # at most PIPE_BUF: a pipe that polls writable takes this much without blocking


class StderrTail:
    """One child's stderr, a pipe.

    `forward` copies it to this process's stderr and keeps the last lines. Forwarding never blocks: while nothing reads
    this process's stderr, lines are only kept. At a terminal, its stdout goes the same way.

    Args:
        role: Put in front of every line.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._partial = b""
        ends = os.pipe2(os.O_CLOEXEC)
        self.fd: int | None = ends[0]
        self._write_fd: int | None = ends[1]
        os.set_blocking(ends[0], False)

    def become_stderr(self) -> None:
        """Make the pipe this process's stderr; call it in the child."""
        assert self._write_fd is not None
        if os.isatty(1) and os.isatty(2):  # what it prints for the terminal is escaped, too
            os.dup2(self._write_fd, 1)
        os.dup2(self._write_fd, 2)
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
        return list(self._lines)

    def close_write_end(self) -> None:
        """Close the write end; call it in the server after the fork."""
        if self._write_fd is not None:
            os.close(self._write_fd)
            self._write_fd = None

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self.close_write_end()
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

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


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NAME_PATH = "/proc/self/comm"
_MAX_REAP_S = 1.0  # for children that were killed to be gone
_MAX_REQUEST_BYTES = 64 * 1024


def main(control_fd: int, driver_pid: int, preload: Sequence[str]) -> None:
    """Serve requests until the driver ends.

    Args:
        control_fd: The server's end of the control socket.
        driver_pid: The driver's process id.
        preload: Modules to import before the first fork; the missing ones are skipped.
    """
    ignore_ending_signals()  # the driver stops this process
    Path(_NAME_PATH).write_text(FORK_SERVER_NAME)
    with contextlib.suppress(ProcessLookupError):
        server = _Server(socket.socket(fileno=control_fd), os.pidfd_open(driver_pid))
        server.end_with_parent(driver_pid)
        _import_all(preload)
        server.serve()


def _import_all(modules: Sequence[str]) -> None:
    if all(name in sys.modules for name in modules):
        return
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # optional; an actor that needs it fails with a better error
        except Exception:
            sys.stderr.write(f"rlzmq fork server: importing {name} failed\n{traceback.format_exc()}")
        if name == "torch":
            # A child's first operation would hang on an inherited thread pool, so none is ever started.
            sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # children share these pages as long as no collection touches them


class _Child:
    """A forked process as the server sees it."""

    def __init__(self, pid: int, role: str, status: socket.socket, tail: StderrTail, words_fd: int) -> None:
        self.pid = pid
        self.words_fd = words_fd
        self.role = role
        self.status: socket.socket | None = status
        self.tail = tail

    def report(self, message: dict[str, Any]) -> None:
        if self.status is not None:
            with contextlib.suppress(OSError):
                self.status.send(json.dumps(message).encode())

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _Server:
    def __init__(self, control: socket.socket, driver_fd: int) -> None:
        self._pid = os.getpid()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._control = control
        self._driver_fd = driver_fd
        self._children: dict[int, _Child] = {}
        self._directories: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._watch(control, self._on_request)
        self._watch(driver_fd, self._end)
        self._watch(self._wake_read, self._reap)

    def end_with_parent(self, pid: int) -> None:
        """End as soon as the parent does or closes its socket, also while imports keep this process busy."""
        control = select.poll()
        control.register(self._control, 0)

        def end(*_: object) -> None:
            # Otherwise only the thread has ended that started this process.
            if os.getppid() != pid or control.poll(0):
                self._end()

        signal.signal(signal.SIGIO, end)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGIO)
        end()  # it ended before the line above

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _watch(self, file: Any, handler: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, handler)

    def _on_request(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MAX_REQUEST_BYTES, 2)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._end()
        request = json.loads(data)
        if request["op"] == "spawn":
            status, channel = (socket.socket(fileno=fd) for fd in fds)
            self._spawn(request["role"], status, channel)
        elif request["op"] == "preload":
            _import_all(request["modules"])
        self._note_directory(request)

    def _note_directory(self, request: dict[str, Any]) -> None:
        if request["op"] == "own":
            self._directories.add(request["path"])
        elif request["op"] == "disown":
            self._directories.discard(request["path"])

    def _spawn(self, role: str, status: socket.socket, channel: socket.socket) -> None:
        tail = StderrTail(role)
        words_fd = make_words_channel()
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory
            status.send(json.dumps({"failed": error.strerror}).encode())
            status.close()
            channel.close()
            tail.close()
            os.close(words_fd)
            return
        if pid == 0:
            self._become_child(role, status, channel, tail, words_fd)
        with contextlib.suppress(OSError):  # parent and child both set it: the first one wins
            os.setpgid(pid, pid)
        channel.close()
        tail.close_write_end()
        status.setblocking(False)
        child = _Child(pid, role, status, tail, words_fd)
        self._children[pid] = child
        child.report({"pid": pid})
        self._watch(status, lambda: self._on_status(child))
        if tail.fd is not None:
            self._watch(tail.fd, lambda: self._on_stderr(child))

    def _become_child(
        self, role: str, status: socket.socket, channel: socket.socket, tail: StderrTail, words_fd: int
    ) -> None:
        """Turn the forked process into an actor; never return."""
        code = 70
        try:
            os.setpgid(0, 0)
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            Path(_NAME_PATH).write_text(role)  # for ps, top and pkill
            if os.getppid() != self._pid:  # it died before the line above
                os._exit(code)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGIO):
                signal.signal(number, signal.SIG_DFL)
            status.close()
            self._close_inherited()
            tail.become_stderr()
            open_words_channel(words_fd)
            from rlzmq.actors.child import run_child

            code = run_child(channel, role)
        except BaseException as error:
            from rlzmq.core.tracebacks import format_error

            leave_words(LastWords.of(error))
            print(format_error(error), file=sys.stderr)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)

    def _close_inherited(self) -> None:
        self._selector.close()
        self._control.close()
        for fd in (self._driver_fd, self._wake_read, self._wake_write):
            os.close(fd)
        for child in self._children.values():
            child.tail.close()
            os.close(child.words_fd)
            if child.status is not None:
                child.status.close()

    def _on_status(self, child: _Child) -> None:
        if child.status is None:
            return
        try:
            data = child.status.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            child.signal(json.loads(data)["signal"])
            return
        self._selector.unregister(child.status)
        child.status.close()
        child.status = None
        child.signal(signal.SIGKILL)

    def _on_stderr(self, child: _Child) -> None:
        fd = child.tail.fd
        if fd is not None and not child.tail.forward():
            self._selector.unregister(fd)
            child.tail.close()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := self._next_ended()) is not None:
                pid, code = ended
                child = self._children.pop(pid, None)
                if child is not None:
                    self._report_exit(child, code)

    def _next_ended(self) -> tuple[int, int] | None:
        """Return the number and exit code of a child that has ended; ChildProcessError: there are no children."""
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        # Kill what the child left behind; its id is not reused yet.
        end_family(info.si_pid, os.getsid(0), parent=self._pid, spared=self._children)
        _, status = os.waitpid(info.si_pid, 0)
        return info.si_pid, os.waitstatus_to_exitcode(status)

    def _report_exit(self, child: _Child, code: int) -> None:
        if child.tail.fd is not None:
            self._selector.unregister(child.tail.fd)
        child.tail.drain()
        words = read_words(child.words_fd)
        child.report(exit_report(code, child.tail.lines(), words))
        child.tail.close()
        os.close(child.words_fd)
        if child.status is not None:
            self._selector.unregister(child.status)
            child.status.close()
            child.status = None

    def _end(self) -> NoReturn:
        """Kill the children, clean up and exit, because the driver has ended; never return.

        A signal handler calls this, too, in the middle of any other method: nothing here relies on what those keep.
        """
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        deadline = time.monotonic() + _MAX_REAP_S
        with contextlib.suppress(ChildProcessError):  # all are gone
            while time.monotonic() < deadline:
                if self._next_ended() is None:
                    time.sleep(0.001)
        for child in self._children.values():
            child.tail.drain()
        self._control.setblocking(False)
        with contextlib.suppress(OSError):
            while data := self._control.recv(_MAX_REQUEST_BYTES):  # the driver's last requests
                self._note_directory(json.loads(data))
        for path in self._directories:
            shutil.rmtree(path, ignore_errors=True)
        os._exit(0)
