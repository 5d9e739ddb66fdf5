"""The sockets' edges and connections: messages as they arrive, events of connections, and which are silent or cut.

The descriptor of a zmq socket becomes readable once for each change of the socket's state; any call
on the socket may consume that edge. Only this module has to follow these rules:

* on a wake-up, receive until EAGAIN, or look at EVENTS if the socket only sends;
* after any other call on the socket (a send, a bind), check EVENTS again;
* handle at most ``max_per_tick`` messages per turn, then continue by ``call_soon``, so that one busy
  socket does not starve the loop;
* when a handler raises, continue by ``call_soon`` as well, because the edge has been consumed.

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
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq

from rlzmq.core.patience import ANSWER_S, LINK_S, FairClock, Patience

__all__ = [
    "SMALL_BYTES",
    "EdgeReader",
    "EventHandler",
    "Frame",
    "MessageHandler",
    "SocketEvent",
    "SocketMonitor",
]


Frame = bytes | memoryview
MessageHandler = Callable[[list[Frame]], None]

_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)  # quicker than pyzmq's enums
SMALL_BYTES = 8192  # below this a received frame has no alignment and pins a larger buffer: copy it
_MAX_DISCARDED = 256  # frames of a message with too many, before the loop may get a turn


class EdgeReader:
    """Delivers the messages of the socket ``raw`` to a handler, on the loop's thread.

    Guarantees: messages of one peer arrive in order; the handler is never entered twice at a time; an
    exception of the handler goes to the loop's exception handler and the next message still arrives.
    After :meth:`detach` the handler is not called again.

    Args:
        raw: The socket.
        on_message: Called with the frames of each message.
        max_per_tick: Messages handled before the loop gets a turn.
        max_frames: Frames of a message; one with more is discarded, and `_on_excess` called. None: no limit.
    """

    def __init__(
        self,
        raw: zmq.Socket[bytes],
        on_message: MessageHandler | None,
        *,
        max_per_tick: int,
        max_frames: int | None = None,
    ) -> None:
        if max_per_tick < 1:
            raise ValueError(f"max_per_tick must be at least 1, not {max_per_tick}")
        self._raw = raw
        self._get: Any = raw.get  # typed loosely: an int or bytes, by option
        self._on_message = on_message
        self._max_per_tick = max_per_tick
        self._max_frames = max_frames
        self._is_discarding = False
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._is_scheduled = False
        self._is_running = False
        self._is_detached = False
        self._first_frame: zmq.Frame | None = None
        self._received: deque[list[Frame]] = deque()  # messages that arrived as one
        self._when_read: list[Callable[[], None]] = []
        self._fd = int(raw.get(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)

    def detach(self) -> None:
        """Stop reading; the raw socket stays open. Idempotent."""
        if self._is_detached:
            return
        self._is_detached = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)

    def when_read(self, callback: Callable[[], None]) -> None:
        """Call a function once, after the handler has been given all messages that have arrived by now."""
        self._when_read.append(callback)
        self.recheck()

    def recheck(self) -> None:
        """Schedule a turn if the last call on the socket consumed an edge."""
        if not (self._is_scheduled or self._is_running or self._is_detached) and self._has_work():
            self._schedule()

    def _has_work(self) -> bool:
        return self._on_message is not None and bool(
            self._when_read or self._received or self._get(_EVENTS) & _POLLIN
        )

    def _split(self, frames: list[Frame]) -> Sequence[list[Frame]]:
        """Return the messages in a received one; a subclass that packs several overrides this."""
        return (frames,)

    def _on_excess(self) -> None:
        """Handle that the message whose first frame is `_first_frame` has too many; subclasses override this."""

    def _flush(self) -> None:
        """Send queued messages; a subclass that sends overrides this."""

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._is_scheduled = False
        self._turn()

    def _turn(self) -> None:
        if self._is_detached:
            return
        self._is_running = True
        try:
            if self._on_message is not None:
                self._receive(self._on_message)
            else:
                self._get(_EVENTS)  # consumes the edge: without it, the loop would wake up again at once
            if not self._is_detached:
                self._flush()
        finally:
            self._is_running = False
            if not (self._is_detached or self._is_scheduled) and self._has_work():
                self._schedule()

    def _receive(self, on_message: MessageHandler) -> None:
        for _ in range(self._max_per_tick):
            if not self._received:
                self._flush()
                if not self._receive_one():
                    self._tell_read()
                    return
            if self._received:  # else it was a part of a message, or discarded
                on_message(self._received.popleft())
            if self._is_detached:
                return

    def _tell_read(self) -> None:
        callbacks, self._when_read = self._when_read, []
        for callback in callbacks:
            callback()

    def _receive_one(self) -> bool:
        receive = self._raw.recv
        if self._is_discarding:
            self._discard()
            return True
        try:
            part = receive(_NOBLOCK, False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                self.detach()
                return False
            raise
        self._first_frame = part
        frames: list[Frame] = [part.bytes if len(part) < SMALL_BYTES else part.buffer]
        while part.more:
            if len(frames) == self._max_frames:
                self._on_excess()
                self._discard()
                return True
            part = receive(_NOBLOCK, False)
            frames.append(part.bytes if len(part) < SMALL_BYTES else part.buffer)
        self._received.extend(self._split(frames))
        return True

    def _discard(self) -> None:
        """Drop the next frames of a message; libzmq delivers nothing else before its last one."""
        for _ in range(_MAX_DISCARDED):
            if not self._raw.recv(_NOBLOCK, False).more:
                self._is_discarding = False
                return
        self._is_discarding = True


_EVENT_AND_VALUE = struct.Struct("=HI")
_PAUSE_S = 0.05  # between two reads: thousands of unauthenticated connections must not wake the loop for each

EventKind = Literal[
    "accept_failed", "accepted", "connected", "disconnected", "handshake_failed", "opened", "retrying"
]

_KINDS: dict[int, tuple[EventKind, str]] = {
    zmq.EVENT_ACCEPTED: ("accepted", ""),
    zmq.EVENT_CONNECTED: ("opened", ""),
    zmq.EVENT_ACCEPT_FAILED: ("accept_failed", ""),
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ("connected", ""),
    zmq.EVENT_DISCONNECTED: ("disconnected", ""),
    zmq.EVENT_CONNECT_RETRIED: ("retrying", ""),
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ("handshake_failed", "refused by the peer's key check"),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ("handshake_failed", "the peer does not speak the protocol"),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ("handshake_failed", "wrong key, no greeting in time, or cut off"),
}


@dataclass(frozen=True, slots=True)
class SocketEvent:
    """One change of one connection.

    Attributes:
        kind: ``accept_failed`` (a connection could not be accepted, e.g. because of the limit of open files:
            `code` is the errno), ``accepted``, ``opened`` (a connection from or to a peer is open, no key is checked
            yet), ``connected``
            (handshake done, keys accepted), ``disconnected``, ``handshake_failed`` (it was never connected;
            a client that sends no greeting causes no such event), ``retrying`` (a connect is repeated later).
        address: The endpoint as libzmq names it.
        reason: Why a handshake failed, else empty.
        code: libzmq's value: a file descriptor, an errno, a ZAP status or a delay in ms.
    """

    kind: EventKind
    address: str
    reason: str
    code: int


EventHandler = Callable[[SocketEvent], None]


class SocketMonitor:
    """Turns the monitor messages of one socket into :class:`SocketEvent` callbacks, at most 0.05 s late."""

    def __init__(self, watched: zmq.Socket[bytes], on_event: EventHandler) -> None:
        mask = 0
        for event in _KINDS:
            mask |= event
        self._watched = watched
        self._on_event = on_event
        self._raw = watched.get_monitor_socket(mask)
        self._raw.set(zmq.LINGER, 0)
        self._reader = _ThrottledReader(self._raw, self._on_message, max_per_tick=256)
        self._reader.recheck()

    def close(self) -> None:
        """Stop the events. Idempotent."""
        self._reader.detach()
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._raw.close(0)

    def _on_message(self, frames: list[Frame]) -> None:
        event, value = _EVENT_AND_VALUE.unpack(frames[0])
        known = _KINDS.get(event)
        if known is None:  # MONITOR_STOPPED is sent regardless of the mask
            return
        kind, reason = known
        self._on_event(SocketEvent(kind, bytes(frames[1]).decode("utf-8", "replace"), reason, value))


class _ThrottledReader(EdgeReader):
    """Reads once, then pauses for ``_PAUSE_S``."""

    _is_paused = False

    def _turn(self) -> None:
        super()._turn()
        if not (self._is_paused or self._is_detached):
            self._is_paused = True
            self._loop.remove_reader(self._fd)
            self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        if not self._is_detached:
            self._loop.add_reader(self._fd, self._turn)
            self.recheck()


with contextlib.suppress(ModuleNotFoundError):  # runs in several processes need it, clients do not
    import fcntl
    import termios

__all__ = ["MAX_NEW", "MAX_NEW_BYTES", "MAX_UNREAD_BYTES", "Connections"]

MAX_UNREAD_BYTES = 64 << 20
"""Four times what a high-water mark of 64 parts lets an honest peer leave unread."""

MAX_NEW_BYTES = 64 << 20
MAX_NEW = 1024

_LOOK_S = 0.1
_HANDSHAKE_S = 2.5  # libzmq ends a handshake after 2 s (`rlzmq.net.context`)
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
