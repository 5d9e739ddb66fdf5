"""The zmq context of a process: created after the process started, closed in bounded time."""

from __future__ import annotations

import os
from typing import Protocol

import zmq

from rlzmq.core.errors import ClosedError, ConfigurationError

__all__ = ["Context", "raise_file_limit"]

_MAX_SOCKETS = 8192  # libzmq's default of 1023 is below what one broker and a thousand runners may need
_WANTED_FILES = 65536  # one descriptor per peer, plus those of the process itself
_NEEDED_FILES = 48  # with fewer, torch, libzmq and the event loop of one process fail in unclear ways


class _Closable(Protocol):
    def close(self) -> None: ...


def raise_file_limit(num_files: int = _WANTED_FILES) -> int:
    """Raise the soft limit of open files as far as the hard limit allows.

    Args:
        num_files: The limit wanted. Never lowered when it is already higher.

    Returns:
        The soft limit now in force.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return num_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


class Context:
    """The I/O thread and the sockets of one process.

    Create it after the process started: messages on a socket that a forked child inherits are lost
    silently, so a context can only be used in the process that created it. It is a context manager.

    Args:
        num_io_threads: libzmq's I/O threads; one carries about a gigabyte per second.

    Raises:
        ConfigurationError: The system lets this process open too few files.

    Example:
        >>> with Context() as context:
        ...     context.closed
        False
    """

    def __init__(self, *, num_io_threads: int = 1) -> None:
        if 0 <= (limit := raise_file_limit()) < _NEEDED_FILES:  # -1: without a limit
            raise ConfigurationError(
                f"only {limit} files may be open in this process, {_NEEDED_FILES} are needed: raise the hard limit "
                "(ulimit -Hn; LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
            )
        self._raw: zmq.Context[zmq.Socket[bytes]] = zmq.Context(num_io_threads)
        self._raw.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._pid = os.getpid()
        self._open: set[_Closable] = set()  # strong references: unreferenced sockets must be closed as well

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._raw.closed

    @property
    def num_open_sockets(self) -> int:
        """Sockets made in this context that are still open."""
        return len(self._open)

    def open_socket(self, socket_type: int, owner: _Closable) -> zmq.Socket[bytes]:
        """Create a raw socket for ``owner``; :meth:`close` closes the owner if it is still open.

        Raises:
            ClosedError: The context was closed, or belongs to the process this one was forked from.
        """
        if self._raw.closed:
            raise ClosedError("this zmq context was closed: make a new Context")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this zmq context belongs to process {self._pid}, not to its fork {os.getpid()}: "
                "make a Context after the process started"
            )
        self._open.add(owner)
        return self._raw.socket(socket_type)

    def forget(self, owner: _Closable) -> None:
        """Record that ``owner`` closed its socket."""
        self._open.discard(owner)

    def close(self) -> None:
        """Close every socket and the I/O thread, within the longest linger. Idempotent."""
        if self._raw.closed or os.getpid() != self._pid:
            return
        for owner in list(self._open):
            owner.close()
        self._raw.term()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
