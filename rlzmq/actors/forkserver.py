"""The driver's side of the fork server: one preloaded server per process, children on request.

Importing this module is cheap and :func:`get_fork_server` returns at once, so that the server imports torch
while the driver still does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlzmq.actors.process_state import MAX_REPORT_BYTES, ActorLostError, ExitStatus, end_family
from rlzmq.core.errors import PeerLostError
from rlzmq.core.patience import Restarts
from rlzmq.core.process import blocked

__all__ = ["PRELOAD", "ForkServer", "ForkedChild", "get_fork_server", "shutdown"]

PRELOAD = (
    "torch",
    "numpy",
    "gymnasium",
    "gymnasium.vector",
    "gymnasium.envs.classic_control",
    "cloudpickle",
    "uvloop",
    "rlzmq.actors.child",
    "rlzmq.roles.runner_role",
    "rlzmq.roles.learner_role",
    "rlzmq.roles.broker_role",
    "rlzmq.algorithms.appo",
    "rlzmq.algorithms.ppo",
)
"""Modules that children find imported. They are names, because this package must not import the layers above it."""

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[3]); from rlzmq.actors.fork_main import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])"
)
_EXIT_S = 1.0  # for a process that was told to end, or killed, to be gone
# Deaths of servers in a row with no process started in between: of one that cannot import what it preloads.
_deaths = Restarts()


class ForkedChild:
    """A process that the fork server started for one owner.

    It is killed when its owner closes it or dies. It belongs to the event loop on which it was created.

    Args:
        status, channel: The sockets that the fork server and the process have the other ends of.
        session: The fork server's session, and so the process's.

    Attributes:
        pid: Its process id.
        channel: The private, non-blocking socket to it.
        exited: Done when the process has ended, with its :class:`ExitStatus`.
    """

    def __init__(self, status: socket.socket, channel: socket.socket, session: int) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._status: socket.socket | None = status
        self.channel = channel
        self.pid: int = 0
        self.started: asyncio.Future[int] = self._loop.create_future()
        self.exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        for each in (status, channel):
            each.setblocking(False)
        self._loop.add_reader(status, self._on_status)

    def signal(self, number: int) -> None:
        """Send a signal; processes that it started end with it. Do nothing if the process has ended."""
        if self._status is not None:
            with contextlib.suppress(OSError):
                self._status.send(json.dumps({"signal": int(number)}).encode())

    def kill(self) -> None:
        """Kill the process and its group."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Release the process; it is killed if it still runs. Idempotent."""
        self.channel.close()
        self._close_status()

    def _on_status(self) -> None:
        assert self._status is not None
        try:
            try:
                data = self._status.recv(MAX_REPORT_BYTES)
            except ConnectionResetError:
                # The fork server closed its end before it read all requests; what it had sent can still be read.
                data = self._status.recv(MAX_REPORT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if self.pid and not self.exited.done():
                end_family(self.pid, self._session)  # the fork server, which would do so, has died
            self._end(ExitStatus(None))
            return
        message = json.loads(data)
        if "pid" in message:
            self.pid = message["pid"]
            if not self.started.done():
                self.started.set_result(self.pid)
        elif "exit" in message:
            self._end(ExitStatus.from_report(message))
        elif not self.started.done():
            self.started.set_exception(PeerLostError(f"the fork server cannot fork: {message['failed']}"))

    def _end(self, status: ExitStatus) -> None:
        self._close_status()
        if not self.started.done():
            self.started.set_exception(PeerLostError("the fork server ended before it made the process"))
        if not self.exited.done():
            self.exited.set_result(status)

    def _close_status(self) -> None:
        if self._status is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._status)
            self._status.close()
            self._status = None


class ForkServer:
    """The server process, started without waiting for its imports: those of `PRELOAD` that exist. Thread-safe."""

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._delay_s: float | None = None
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[2])
        # One thread by default: children adopt the driver's settings later.
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        try:
            with blocked():  # until it ignores them
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-c",
                        _BOOT,
                        str(theirs.fileno()),
                        str(os.getpid()),
                        root,
                        *PRELOAD,
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **one_thread},
                    start_new_session=True,  # whose number is its own
                )
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether the server runs and belongs to this process, not to the process that this one was forked from."""
        return self._owner_pid == os.getpid() and self._process.poll() is None

    async def restart_delay_s(self, error: PeerLostError) -> float | None:
        """Return how long to wait before the next server is asked for a process.

        Args:
            error: Why this one did not start one.

        Returns:
            Seconds; None: the process ended by itself, or too many servers died in a row.
        """
        if isinstance(error, ActorLostError) and error.exit_status != ExitStatus(None):
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):  # it has closed its sockets before it ends
                while self.is_usable:  # noqa: ASYNC110 (a fact of the kernel's)
                    await asyncio.sleep(0.01)
        if self._delay_s is None and not self.is_usable:
            self._delay_s = _deaths.failed()
        return self._delay_s

    def note_work(self) -> None:
        """Record that a process of this server has started."""
        _deaths.note_work()

    def send_signal(self, number: int) -> None:
        """Send a signal to the server; do nothing if it has ended."""
        self._process.send_signal(number)

    def spawn(self, role: str) -> ForkedChild:
        """Request a child that runs :func:`rlzmq.actors.child.run_child`; call it on a running event loop.

        Args:
            role: Its name: in front of its stderr lines and in error texts.

        Returns:
            The child; await its ``started`` to know that the fork succeeded.

        Raises:
            PeerLostError: The server has died.
        """
        status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        child = ForkedChild(status, channel, self.pid)
        try:
            self._request(
                {"op": "spawn", "role": role},
                (their_status.fileno(), their_channel.fileno()),
            )
        except BaseException:
            child.close()
            raise
        finally:
            their_status.close()
            their_channel.close()
        return child

    def preload(self, modules: Sequence[str]) -> None:
        """Import these modules in the server as well, before any child that is requested later."""
        self._request({"op": "preload", "modules": list(modules)})

    def own_directory(self, path: str | os.PathLike[str]) -> None:
        """Register a directory that the server removes if this process dies without cleaning up."""
        self._request({"op": "own", "path": os.fspath(path)})

    def disown_directory(self, path: str | os.PathLike[str]) -> None:
        """Revoke :meth:`own_directory`."""
        with contextlib.suppress(PeerLostError):
            self._request({"op": "disown", "path": os.fspath(path)})

    def close(self) -> None:
        """Stop the server and all its children. Idempotent; does nothing in a fork of the owner."""
        with self._lock:
            if self._owner_pid != os.getpid() or self._control.fileno() < 0:
                return
            self._control.close()
            self._process.send_signal(signal.SIGIO)  # it may be importing
        try:
            self._process.wait(2 * _EXIT_S)  # its children first
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            with self._lock:
                socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise PeerLostError(f"the fork server (pid {self.pid}) is gone: {error.strerror}") from error


_server: ForkServer | None = None
_server_lock = threading.Lock()


def get_fork_server() -> ForkServer:
    """Return this process's fork server at once; start it if there is none, or if it has died.

    Called before this process imports torch, it imports torch at the same time.
    """
    global _server
    with _server_lock:
        if _server is None or not _server.is_usable:
            if _server is not None:
                _server.close()
            _server = ForkServer()
        return _server


def shutdown() -> None:
    """Stop this process's fork server and all its children; the next use starts a new one."""
    global _server
    with _server_lock:
        server, _server = _server, None
    if server is not None:
        server.close()


# Registered on import, and so before the handlers of all users of the server, which therefore run first: supervision
# (`rlzmq.actors.loop_thread`) has stopped by then and does not report the end of these processes.
atexit.register(shutdown)
