"""The TCP connections of a socket: which are silent, what each has sent that nobody has read yet, and which are cut.

A peer is there as long as its bytes arrive, whatever they are: clients ping, but a ping may wait behind their own data
for longer than any fixed time. So the limit follows what was measured on the connection (`rlzmq.core.patience`).

On a socket that listens, there are bounds as well. libzmq queues whole messages only, so its high-water marks bound
neither a message that never ends nor the frame of a handshake. What arrived on a connection is known to the kernel
(``TCP_INFO``), though, whatever libzmq does with it:

```
unread = received by the kernel - waiting in the kernel - received when one of its messages was last read
```

| bound | of | beyond it |
|---|---|---|
| `MAX_UNREAD_BYTES` | one connection | it is cut: an honest peer stops far below, at the high-water mark |
| `MAX_NEW_BYTES` | all connections of which nothing was read yet, together | the largest are cut |
| `MAX_NEW` | connections in their handshake | the oldest are cut: an honest handshake takes milliseconds |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from rlzmq.core.patience import ANSWER_S, LINK_S, FairClock, Patience
from rlzmq.net.events import SocketEvent

with contextlib.suppress(ModuleNotFoundError):  # runs in several processes need it, clients do not
    import fcntl
    import termios

__all__ = ["MAX_NEW", "MAX_NEW_BYTES", "MAX_UNREAD_BYTES", "Connections"]

MAX_UNREAD_BYTES = 64 << 20
"""Four times what a high-water mark of 64 parts lets an honest peer leave unread."""

MAX_NEW_BYTES = 64 << 20
MAX_NEW = 1024

_LOOK_S = 0.1
_HANDSHAKE_S = 2.5  # libzmq ends a handshake after 2 s (`SocketOptions.handshake_interval_ms`)
_COMMANDS_BYTES_PER_S = 4096  # pings and answers, which libzmq reads itself
_RECEIVED = struct.Struct("@Q")
_RECEIVED_OFFSET = 128  # tcpi_bytes_received in struct tcp_info (Linux 4.1)


@dataclass(slots=True)
class _Connection:
    """One connection.

    Attributes:
        socket: Borrows libzmq's descriptor.
        inode: Tells this connection from a later one with its descriptor.
        read: Bytes that had arrived when a message was last read, and those of commands.
        was_read: Whether a message was read since the last look without one.
        received: Bytes that had arrived at the last look.
        silence: How long none may arrive.
    """

    socket: socket.socket
    inode: int
    address: str
    since: float
    read: float = 0.0
    has_spoken: bool = False
    was_read: bool = False
    is_cut: bool = False
    received: int = 0
    silence: Patience = field(default_factory=lambda: Patience(LINK_S, ANSWER_S))

    def num_received(self) -> int:
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_OFFSET + _RECEIVED.size)
        return int(_RECEIVED.unpack_from(info, _RECEIVED_OFFSET)[0])

    def num_in_kernel(self) -> int:
        waiting = fcntl.ioctl(self.socket, termios.FIONREAD, struct.pack("i", 0))
        return int(struct.unpack("i", waiting)[0])


class Connections:
    """Looks at the connections of one socket, on its event loop, and ends those that are silent or beyond a bound.

    Args:
        on_cut: Called with the descriptor, address and reason of a connection that is cut, and whether its key was
            let in; not for silence.
        is_bounded: Whether the bounds hold, of a socket that listens.
    """

    def __init__(self, on_cut: Callable[[int, str, str, bool], None], *, is_bounded: bool) -> None:
        self._on_cut = on_cut
        self._is_bounded = is_bounded
        self._moving: set[int] = set()
        self._clock = FairClock(_LOOK_S)
        self._open: dict[int, _Connection] = {}
        self._read: set[int] = set()  # descriptors of which a message was read since the last look
        self._loop = asyncio.get_running_loop()
        self._looked_at = self._loop.time()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def on_event(self, event: SocketEvent) -> None:
        """Note a connection that came or went."""
        if event.kind in ("accepted", "opened"):
            self._forget(event.code)
            with contextlib.suppress(OSError):  # it is gone already
                inode = os.fstat(event.code).st_ino
                borrowed = socket.socket(fileno=event.code)
                try:
                    address = str(borrowed.getpeername()[0])
                except (OSError, IndexError):
                    borrowed.detach()
                    return
                connection = _Connection(borrowed, inode, address, self._loop.time())
                connection.silence.begin(self._clock.now())
                self._open[event.code] = connection
        elif event.kind == "disconnected":
            self._read.discard(event.code)
            self._forget(event.code)

    def read(self, fd: int) -> None:
        """Note that a message was read."""
        self._read.add(fd)

    def take_moving(self) -> set[int]:
        """Return the descriptors of the connections on which data arrived since the last call, complete or not."""
        moving, self._moving = self._moving, set()
        return moving

    def cut(self, fd: int, reason: str, *, is_let_in: bool = True) -> None:
        """End a connection. Idempotent."""
        connection = self._open.get(fd)
        if connection is None or connection.is_cut:
            return
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino != connection.inode:
                self._forget(fd)
                return
            connection.is_cut = True
            connection.socket.shutdown(socket.SHUT_RDWR)
        self._on_cut(fd, connection.address, reason, is_let_in)

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._timer.cancel()
        for fd in list(self._open):
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        connection = self._open.pop(fd, None)
        if connection is not None:
            connection.socket.detach()

    def _look(self) -> None:
        now, fair_now = self._loop.time(), self._clock.now()
        commands = _COMMANDS_BYTES_PER_S * (now - self._looked_at)
        self._looked_at = now
        # Events come late: of a connection that is not known yet, a message may have been read already.
        read, self._read = self._read, self._read - self._open.keys()
        new: list[tuple[float, int]] = []
        young: list[int] = []
        for fd, connection in list(self._open.items()):
            with contextlib.suppress(OSError):
                received = connection.num_received()
                num_new, connection.received = received - connection.received, received
                if num_new > commands:
                    self._moving.add(fd)
                if num_new:
                    connection.silence.moved(fair_now)
                elif connection.silence.is_over(fair_now) and not connection.is_cut:
                    connection.is_cut = True
                    connection.socket.shutdown(socket.SHUT_RDWR)
                if fd in read:
                    connection.has_spoken = connection.was_read = True
                if fd in read or not self._is_bounded:
                    continue
                if connection.was_read:
                    connection.read, connection.was_read = received, False
                connection.read = min(connection.read + commands, received)
                unread = received - connection.read
                if unread > MAX_UNREAD_BYTES and unread - connection.num_in_kernel() > MAX_UNREAD_BYTES:
                    self.cut(fd, f"{unread / 2**20:.0f} MiB from it make no message that could be read")
                elif not (connection.has_spoken or connection.is_cut):
                    new.append((unread, fd))
                    if now - connection.since < _HANDSHAKE_S:
                        young.append(fd)
        for fd in young[: max(0, len(young) - MAX_NEW)]:
            self.cut(fd, f"more than {MAX_NEW} connections are in their handshake", is_let_in=False)
        num_bytes = sum(unread for unread, _ in new)
        for unread, fd in sorted(new, reverse=True):
            if num_bytes <= MAX_NEW_BYTES:
                break
            self.cut(fd, f"connections without a message sent {num_bytes / 2**20:.0f} MiB", is_let_in=False)
            num_bytes -= unread
        self._timer = self._loop.call_later(_LOOK_S, self._look)
