"""The zmq context of a process: created after the process started, closed in bounded time."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Protocol

import zmq

from rlzmq.core.errors import ClosedError, ConfigurationError

__all__ = ["CONTROL", "Context", "SocketOptions", "raise_file_limit"]


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

    Raises:
        ConfigurationError: The system lets this process open too few files.

    Example:
        >>> with Context() as context:
        ...     context.closed
        False
    """

    def __init__(self) -> None:
        if 0 <= (limit := raise_file_limit()) < _NEEDED_FILES:  # -1: without a limit
            raise ConfigurationError(
                f"only {limit} files may be open in this process, {_NEEDED_FILES} are needed: raise the hard limit "
                "(ulimit -Hn; LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
            )
        self._raw: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._raw.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._pid = os.getpid()
        self._open: set[_Closable] = set()  # strong references: unreferenced sockets must be closed as well

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._raw.closed

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

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop. The context is closed also if the caller is cancelled."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.close))

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_MIB = 1024 * 1024
_HANDSHAKE_MS = 2000  # a client that does not complete its handshake in this time is dropped
# An attempt to connect is abandoned after this time and repeated. The system's own retries become rare: after a cut of
# a minute they would wait for another half.
_CONNECT_MS = 2500


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Bounds and timers of one socket.

    Every value is finite on purpose: libzmq's defaults wait forever (linger), accept messages of any
    size. Half-open connections are found by `rlzmq.net.events`.

    Attributes:
        max_message_bytes: Largest frame that is sent or accepted, in bytes. libzmq counts per frame
            and disconnects a peer that exceeds it; the sender therefore checks first and raises. Over TCP, the largest
            message: its frames, of any number, travel in small parts.
        send_high_water_mark: Messages that libzmq queues per peer before a send has to wait in the
            socket's own queue. Ignored on a ROUTER, which always has no limit: there a limit would
            make one slow peer block the others, and memory is bounded by credits instead.
        receive_high_water_mark: Messages that libzmq queues per peer before it stops reading; 0: no limit. libzmq
            aborts the process if a connection breaks while it does not read from it and a ping is due there: so a
            client, which pings, stays far below it.
        max_queued_messages: Messages that the socket's own send queue holds while peers are slow.
        max_queued_bytes: Bytes that the socket's own send queue holds while peers are slow.
        linger_ms: How long ``close`` keeps delivering what was sent, in milliseconds.
        reconnect_interval_ms: First delay before connecting again; it doubles ...
        reconnect_interval_max_ms: ... up to this.
    """

    max_message_bytes: int = _MIB
    send_high_water_mark: int = 64
    receive_high_water_mark: int = 64
    max_queued_messages: int = 1024
    max_queued_bytes: int = 64 * _MIB
    linger_ms: int = 0
    reconnect_interval_ms: int = 100
    reconnect_interval_max_ms: int = 5000

    def __post_init__(self) -> None:
        if self.max_message_bytes <= 0:
            raise ValueError(f"max_message_bytes must be positive, not {self.max_message_bytes}")
        if self.linger_ms < 0:
            raise ValueError("linger_ms must be 0 or more: waiting forever would hang the process's exit")

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options on a new socket, before it is bound or connected."""
        is_router = socket.get(zmq.TYPE) == zmq.ROUTER
        socket.set(zmq.MAXMSGSIZE, self.max_message_bytes)
        socket.set(zmq.SNDHWM, 0 if is_router else self.send_high_water_mark)
        socket.set(zmq.RCVHWM, self.receive_high_water_mark)
        socket.set(zmq.LINGER, self.linger_ms)
        socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.set(zmq.RECONNECT_IVL, self.reconnect_interval_ms)
        socket.set(zmq.RECONNECT_IVL_MAX, self.reconnect_interval_max_ms)
        socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        if is_router:
            # Without MANDATORY a message to an unknown or dead peer vanishes silently; without HANDOVER
            # a peer that comes back under its old routing id is ignored forever.
            socket.set(zmq.ROUTER_MANDATORY, 1)
            socket.set(zmq.ROUTER_HANDOVER, 1)


CONTROL = SocketOptions()
"""Small messages: registration, leases, acknowledgements, calls."""
