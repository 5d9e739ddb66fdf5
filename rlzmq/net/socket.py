"""A zmq socket on an asyncio loop: callbacks for received messages, a bounded queue for sent ones.

Small frames of one or several messages leave as one frame: a zmq message costs at each socket that it passes, and so
does each of its frames, more than copying a few kilobytes.

```
frame 0:  [PACKED: 2 bytes][number n: 2 bytes][n entries: 4 bytes each][the small frames, one after the other]
frame 1…: the other frames, in order
entries, for each message: its number of frames, and each frame's length, or OUTSIDE
```

Both ends of a connection must be of the same release: no wire version (`rlzmq.wire.codec`) begins with this byte.

libzmq hands over whole messages only, and bounds neither their frames nor their sum. So a message over TCP that has
more than one frame, or a large one, travels as several, which the receiver can count and refuse one by one:

```
frame 0:  [PART: 2 bytes][message: 4 bytes][part: 4 bytes][last of its frame: 1 bit, last of its message: 1 bit]
frame 1:  at most PART_BYTES of one of the message's frames
```
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import zmq

from rlzmq.core.addresses import AddressLock, check_bind_address, check_connect_address
from rlzmq.core.errors import ClosedError, ConfigurationError, PeerLostError, ProtocolError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.net.context import CONTROL, Context, SocketOptions
from rlzmq.net.events import (
    SMALL_BYTES,
    Connections,
    EdgeReader,
    EventHandler,
    Frame,
    MessageHandler,
    SocketEvent,
    SocketMonitor,
)
from rlzmq.net.keys import CurveClient, CurveServer
from rlzmq.wire.codec import (
    MAX_ARRAYS,
    BoundExceededError,
    Buffer,
    MalformedFrameError,
    WireError,
    wire_decoder,
)

__all__ = [
    "MAX_PACKED_BYTES",
    "MAX_PACKED_FRAMES",
    "PACKED",
    "PART",
    "PART_BYTES",
    "CutHandler",
    "DrainSocket",
    "Frame",
    "PartialMessages",
    "SendTicket",
    "pack_frames",
    "parts_of",
    "sizes_of",
    "unpack_frames",
]

PACKED = b"\xf1\0"
"""Frames below `SMALL_BYTES`, which receivers copy anyway, in one."""

MAX_PACKED_BYTES = 64 * 1024
"""Bytes of small frames that are packed; later ones are not."""

MAX_PACKED_FRAMES = 2 * (MAX_ARRAYS + 2)
"""Frames of all messages together; a message of the codec has at most half as many."""

PART = b"\xf2\0"
PART_BYTES = 256 * 1024
"""Data of a part. Encrypting it takes ten times as long as passing one more message to libzmq."""

_PART_HEAD = struct.Struct("<2sIIB")
_ENDS_FRAME, _ENDS_MESSAGE = 1, 2
_PART_COST_BYTES = 256  # of an unfinished message, beside its data

_OUTSIDE = 2**32 - 1
_HEAD = struct.Struct("<2sH")
_MAX_BYTES = _HEAD.size + 8 * MAX_PACKED_FRAMES + MAX_PACKED_BYTES

# Called with the address of a connection that was cut, its routing id (b"": it has sent no message), the reason, and
# whether its key was let in.
CutHandler: TypeAlias = Callable[[str, bytes, str, bool], None]

# Of a part, and of a frame of a handshake, which is received before the key is known.
MAX_TCP_FRAME_BYTES = PART_BYTES + 1024

_TYPES = {name: int(getattr(zmq, name)) for name in ("DEALER", "PUB", "PULL", "PUSH", "ROUTER", "SUB")}
# Plain ints: operations on pyzmq's enums take a microsecond each, several for every message.
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_CANNOT_RECEIVE = (zmq.PUB, zmq.PUSH)
# Clients ping, since libzmq aborts where a listening socket would ping a flooding peer. Who is there is decided in
# `rlzmq.net.events`, by any byte.
_PING_MS, _NEVER_MS = 100, 2**31 - 1
_Messages: TypeAlias = list[tuple[Sequence[Any], list[int]]]  # frames and their sizes
_MAX_BATCH = 64  # messages that leave as one: its receiver begins while the next ones are made
_COPY_BELOW_BYTES = 16 * 1024  # measured: below this size copying is faster than passing the buffer


def sizes_of(frames: Iterable[Buffer]) -> list[int]:
    """Return the bytes of each frame."""
    return [len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in frames]


def pack_frames(messages: Iterable[tuple[Sequence[Buffer], Sequence[int]]]) -> list[Buffer]:
    """Return the frames of one message that contains all of these.

    Args:
        messages: The frames of each and `sizes_of` them; at least one message, `MAX_PACKED_FRAMES` frames in all.
    """
    entries: list[int] = []
    small: list[Buffer] = [b"", b""]
    packed: list[Buffer] = [b""]
    num_bytes = 0
    for frames, sizes in messages:
        entries.append(len(frames))
        if max(sizes) < SMALL_BYTES and num_bytes + sum(sizes) <= MAX_PACKED_BYTES:
            num_bytes += sum(sizes)
            entries += sizes
            small += frames
            continue
        for frame, size in zip(frames, sizes, strict=True):
            if size < SMALL_BYTES and num_bytes + size <= MAX_PACKED_BYTES:
                num_bytes += size
                entries.append(size)
                small.append(frame)
            else:
                entries.append(_OUTSIDE)
                packed.append(frame)
    small[0] = _HEAD.pack(PACKED, len(entries))
    small[1] = struct.pack(f"<{len(entries)}I", *entries)
    packed[0] = b"".join(small)
    return packed


@wire_decoder
def unpack_frames(frames: Sequence[Buffer]) -> list[list[Buffer]]:
    """Return the messages from a result of `pack_frames`; small frames are bytes.

    Raises:
        WireError: The frames are not such a result.
    """
    if not _HEAD.size <= len(frames[0]) <= _MAX_BYTES:
        raise MalformedFrameError(f"packed frames have at most {_MAX_BYTES} bytes, got {len(frames[0])}")
    body = bytes(frames[0])
    num = _HEAD.unpack_from(body)[1]
    end = _HEAD.size + 4 * num
    if len(body) < end:
        raise MalformedFrameError(f"a table of {num} packed frames and messages in {len(body)} bytes")
    entries = struct.unpack_from(f"<{num}I", body, _HEAD.size)
    messages: list[list[Buffer]] = []
    place, outside = 0, 1
    while place < num:
        sizes = entries[place + 1 : place + 1 + entries[place]]
        if not sizes or len(sizes) < entries[place]:
            raise MalformedFrameError(
                f"a packed message of {entries[place]} frames, {len(sizes)} are declared"
            )
        place += 1 + len(sizes)
        message: list[Buffer] = []
        for size in sizes:
            if size == _OUTSIDE:
                message += frames[outside : outside + 1]
                outside += 1
            else:
                begin, end = end, end + size
                message.append(body[begin:end])
        messages.append(message)
    if not messages or end != len(body) or outside != len(frames):
        raise MalformedFrameError("packed messages do not fill their frames")
    return messages


def parts_of(frames: Sequence[Buffer], number: int) -> list[list[Buffer]]:
    """Return the messages of two frames in which a message travels; the data is not copied.

    Args:
        frames: The message.
        number: Distinguishes the messages of one sender.
    """
    parts: list[list[Buffer]] = []
    for place, frame in enumerate(frames):
        num_bytes = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        data = np.frombuffer(frame, np.uint8) if num_bytes > PART_BYTES else frame
        for begin in range(0, max(num_bytes, 1), PART_BYTES):
            ends = _ENDS_FRAME if begin + PART_BYTES >= num_bytes else 0
            if ends and place == len(frames) - 1:
                ends |= _ENDS_MESSAGE
            head = _PART_HEAD.pack(PART, number & 0xFFFFFFFF, len(parts), ends)
            parts.append([head, data if num_bytes <= PART_BYTES else data[begin : begin + PART_BYTES]])
    return parts


@dataclass(slots=True)
class _Partial:
    """A message of which some parts have arrived."""

    number: int
    num_parts: int = 0
    num_bytes: int = 0
    frames: list[Buffer] = field(default_factory=list)
    pieces: list[Buffer] = field(default_factory=list)


class PartialMessages:
    """Puts the parts of messages together, for the peers of one socket.

    A message of which a part was lost with its connection is lost as a whole.

    Args:
        max_message_bytes: Bound of one message.
        max_all_bytes: Bound of all unfinished messages; beyond it, the largest is dropped.
    """

    def __init__(self, max_message_bytes: int, max_all_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_all_bytes = max_all_bytes
        self._partial: dict[bytes, _Partial] = {}
        self.num_bytes: int = 0

    @wire_decoder
    def add(self, peer: bytes, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Return the message that a part completes, or None.

        Raises:
            MalformedFrameError: It is not a part.
            BoundExceededError: The message is too large. It is dropped.
        """
        if len(frames) != 2 or len(frames[0]) != _PART_HEAD.size:
            raise MalformedFrameError(f"a part of a message has 2 frames, got {len(frames)}")
        _, number, index, ends = _PART_HEAD.unpack(frames[0])
        if index == 0:
            self.forget(peer)
            self._partial[peer] = _Partial(number)
        partial = self._partial.get(peer)
        if partial is None or (partial.number, partial.num_parts) != (number, index):
            self.forget(peer)
            return None
        data = frames[1]
        partial.num_parts += 1
        partial.num_bytes += len(data) + _PART_COST_BYTES
        self.num_bytes += len(data) + _PART_COST_BYTES
        partial.pieces.append(data)
        if ends & _ENDS_FRAME:
            pieces, partial.pieces = partial.pieces, []
            partial.frames.append(pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces)))
        if ends & _ENDS_MESSAGE:
            self.forget(peer)
            return partial.frames
        if partial.num_bytes > self._max_message_bytes or len(partial.frames) > MAX_ARRAYS + 2:
            self.forget(peer)
            raise BoundExceededError(
                f"a message has at most {self._max_message_bytes} bytes in {MAX_ARRAYS + 2} frames"
            )
        if self.num_bytes > self._max_all_bytes:
            self.forget(max(self._partial, key=lambda other: self._partial[other].num_bytes))
        return None

    def forget(self, peer: bytes) -> None:
        """Drop a peer's unfinished message."""
        partial = self._partial.pop(peer, None)
        if partial is not None:
            self.num_bytes -= partial.num_bytes


class SendTicket:
    """Reports when libzmq is done with one message: it was passed to the system, or its connection is gone.

    Only then may an array that was sent be overwritten; until then the message uses memory. An
    acknowledgement by the receiver implies it.
    """

    __slots__ = ("_is_queued", "_tracker")

    def __init__(self) -> None:
        self._is_queued = True
        self._tracker: zmq.MessageTracker | None = None

    @property
    def done(self) -> bool:
        """Whether no part of the message is waiting here."""
        return not self._is_queued and self._tracker is not None and self._tracker.done


@dataclass(slots=True)
class _Waiting:
    """Messages to one peer that leave as one; `parts` is what is left of it once a part has left."""

    ticket: SendTicket | None
    messages: _Messages = field(default_factory=list)
    num_bytes: int = 0
    num_frames: int = 0
    parts: Sequence[Sequence[Any]] | None = None

    def has_room(self, sizes: list[int]) -> bool:
        return (
            self.ticket is None
            and self.parts is None
            and len(self.messages) < _MAX_BATCH
            and self.num_frames + len(sizes) <= MAX_PACKED_FRAMES
            and self.num_bytes + sum(sizes) <= MAX_PACKED_BYTES
        )


class DrainSocket(EdgeReader):
    """One zmq socket, used by one task on one thread.

    Receiving: ``on_message(frames)`` is called on the loop for every message, in order per peer. A frame
    is ``bytes`` below 8 kB, else a writable zero-copy ``memoryview`` that stays valid while it is
    referenced. Frames can be passed to ``send`` of another socket without a copy.

    Sending: :meth:`send` never blocks. While a peer is slow, messages wait in the socket's own queue,
    bounded in messages and bytes. If the queue is full, ``send`` returns False and takes nothing.
    Order is kept. No socket guarantees delivery: protocols that need it use acknowledgements.

    Over TCP (with ``curve``) a ROUTER or DEALER sends large messages in parts, and receives nothing else than messages
    of at most two frames, each small (see the module docstring). A message with more frames, or parts that exceed
    ``max_message_bytes``, cut the connection.

    A ROUTER always has MANDATORY and HANDOVER set and no send limit, so it queues nothing but what ``packs`` lets wait;
    bound its memory by credits.

    Args:
        context: The process's context.
        zmq_type: ``"ROUTER"``, ``"DEALER"``, ``"PUB"``, ``"SUB"``, ``"PUSH"`` or ``"PULL"``.
        on_message: Called with the frames of each message; None for a socket that only sends.
        options: Bounds and timers, see :class:`SocketOptions`.
        max_per_tick: Messages handled before the loop gets a turn.
        routing_id: How a ROUTER addresses this DEALER: one per incarnation, 1–255 bytes, not starting
            with a zero byte.
        subscriptions: Topic prefixes of a SUB.
        curve: Keys: ``CurveServer`` on the side that binds, ``CurveClient`` on the side that connects.
        on_event: Called with connection events.
        on_cut: Called when a connection is cut because it exceeds a bound (`rlzmq.net.events`).
        packs: Whether small frames are packed into one (see the module docstring), for a ROUTER or DEALER whose
            peers do so, too. Messages to one peer from the handler of one received message, or of several that
            arrived packed, leave packed as well: all but the first, when the handler has returned. So nothing waits
            for a later event, and the busier the sockets are, the fewer messages zmq carries.
        name: The socket's name in error texts.

    Raises:
        ConfigurationError: Unknown ``zmq_type``.

    Example:
        >>> socket = DrainSocket(context, "DEALER", print, routing_id=b"runner-1.0")  # doctest: +SKIP
        >>> socket.connect("ipc:///run/user/1000/rlzmq-x/broker")  # doctest: +SKIP
        >>> socket.send([b"hello"])  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        context: Context,
        zmq_type: str,
        on_message: MessageHandler | None,
        *,
        options: SocketOptions = CONTROL,
        max_per_tick: int = 256,
        routing_id: bytes | None = None,
        subscriptions: Sequence[bytes] = (),
        curve: CurveServer | CurveClient | None = None,
        on_event: EventHandler | None = None,
        on_cut: CutHandler | None = None,
        packs: bool = False,
        name: str = "",
    ) -> None:
        if zmq_type not in _TYPES:
            raise ConfigurationError(f"no socket type {zmq_type!r}.{did_you_mean(zmq_type, _TYPES)}")
        self.options = options
        self.name: str = name or zmq_type.lower()
        self._context = context
        self._curve = curve
        self._num_ids = int(zmq_type == "ROUTER")  # frames in front of a message that name its peer
        self._packs = packs
        self._queues: dict[bytes, deque[_Waiting]] = {}  # by peer
        self._num_queued_messages = 0
        self._num_queued_bytes = 0
        self._has_sent_to: set[bytes] = set()  # peers, in this turn
        self._locks: list[AddressLock] = []
        self._monitor: SocketMonitor | None = None
        self._on_event = on_event
        self._on_cut = on_cut
        self._connections: Connections | None = None
        self._fds: dict[bytes, int] = {}  # of the connections of peers that have sent a message
        # Over TCP, a frame that libzmq receives, from whoever it is, has the size of a part.
        self._partial: PartialMessages | None = None
        if curve is not None and zmq_type in ("ROUTER", "DEALER"):
            self._partial = PartialMessages(options.max_message_bytes, 2 * options.max_message_bytes)
        self._num_sent = int.from_bytes(os.urandom(4), "little")

        raw = context.open_socket(_TYPES[zmq_type], self)
        try:
            options.apply(raw)
            if curve is not None:
                raw.set(zmq.MAXMSGSIZE, MAX_TCP_FRAME_BYTES)
            raw.copy_threshold = _COPY_BELOW_BYTES
            if routing_id is not None:
                raw.set(zmq.ROUTING_ID, routing_id)
            for topic in subscriptions:
                raw.set(zmq.SUBSCRIBE, topic)
            if curve is not None:
                curve.apply(raw)
            if _TYPES[zmq_type] in _CANNOT_RECEIVE:
                on_message = None
            super().__init__(
                raw,
                on_message,
                max_per_tick=max_per_tick,
                max_frames=None if self._partial is None else self._num_ids + 2,
            )
            if isinstance(curve, CurveClient):
                raw.set(zmq.HEARTBEAT_IVL, _PING_MS)
                raw.set(zmq.HEARTBEAT_TIMEOUT, _NEVER_MS)
            if curve is not None:
                self._connections = Connections(self._cut, is_bounded=isinstance(curve, CurveServer))
            if on_event is not None or self._connections is not None:
                self._monitor = SocketMonitor(raw, self._connection_changed)
        except BaseException:
            raw.close(0)
            context.forget(self)
            raise

    # -- addresses -----------------------------------------------------------------------------------

    def bind(self, address: str) -> str:
        """Listen on ``address``.

        Returns:
            The address to connect to, with the port that the system chose in place of TCP port 0.

        Raises:
            ConfigurationError: The address is taken by another process, not allowed (a wildcard, TCP
                without keys), or too long for a Unix socket.
        """
        self._check_usable()
        check_bind_address(address, has_keys=isinstance(self._curve, CurveServer))
        lock = AddressLock.take(address)
        self._allow_ipv6(address)
        try:
            self._raw.bind(address)
        except zmq.ZMQError as error:
            if lock is not None:
                lock.release()
            raise ConfigurationError(
                f"cannot listen on {address}: {_describe_bind_error(error, address)}"
            ) from error
        if lock is not None:
            self._locks.append(lock)
        self.recheck()
        endpoint: bytes = self._get(zmq.LAST_ENDPOINT)
        return endpoint.rstrip(b"\0").decode()

    def connect(self, address: str) -> None:
        """Connect to ``address``, and reconnect in the background.

        This returns at once; the peer need not listen yet. It may be called for several addresses.

        Raises:
            ConfigurationError: The address is malformed, or TCP without keys.
        """
        self._check_usable()
        check_connect_address(address, has_keys=isinstance(self._curve, CurveClient))
        self._allow_ipv6(address)
        try:
            self._raw.connect(address)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"cannot connect to {address}: {error.strerror}") from error
        self.recheck()

    def _allow_ipv6(self, address: str) -> None:
        """Let the socket use an IPv6 address. Of a name, libzmq would then try its first IPv6 address only."""
        if address.startswith("tcp://["):
            self._raw.set(zmq.IPV6, 1)

    # -- sending -------------------------------------------------------------------------------------

    @property
    def num_queued_messages(self) -> int:
        """Messages that wait in the socket's own queue because the peer is slow or away."""
        return self._num_queued_messages

    def send(self, frames: Sequence[Any], ticket: SendTicket | None = None) -> bool:
        """Send one message, or queue it while the peer is slow. Never blocks.

        Frames of 16 kB or more are passed without a copy: do not overwrite their buffers before the message
        was acknowledged, or pass a ``ticket`` and wait for its ``done``.

        Args:
            frames: Buffers (bytes, memoryview, contiguous arrays); on a ROUTER the first is the peer's
                routing id.
            ticket: Filled with the state of the message's buffers.

        Returns:
            True if the message was sent or queued; False if the queue is full and nothing was taken.

        Raises:
            PeerLostError: On a ROUTER, when the peer is not connected; a message that is packed with earlier ones
                is lost instead.
            ProtocolError: A frame is larger than the channel carries.
            ClosedError: The socket was closed.
        """
        self._check_usable()
        sizes = sizes_of(frames)
        largest, what = max(sizes), "frame"
        if self._partial is not None:  # as the receiver counts it
            num_parts = len(sizes) + sum(size // PART_BYTES for size in sizes)
            largest, what = sum(sizes) + num_parts * _PART_COST_BYTES, "message"
        if largest > self.options.max_message_bytes:
            raise ProtocolError(
                f"a {what} of {largest} bytes is larger than the {self.options.max_message_bytes} bytes "
                f"that {self.name} carries: send smaller pieces or raise max_message_bytes on both sides"
            )
        peer = bytes(frames[0]) if self._num_ids else b""
        must_wait = peer in self._queues
        if self._packs and self._is_running:
            must_wait |= peer in self._has_sent_to
            self._has_sent_to.add(peer)
        unsent: Sequence[Sequence[Any]] | None = None
        if not must_wait:
            parts = self._as_sent([(frames, sizes)])
            try:
                unsent = self._try_send_all(parts, ticket)
            except PeerLostError:
                self.recheck()
                raise
            if not unsent:
                self.recheck()
                return True
            if len(unsent) == len(parts):
                unsent = None
        num_bytes = sum(sizes)
        if self._is_full(num_bytes) and self._is_running:
            self._flush()
        if unsent is None and self._queues and self._is_full(num_bytes):
            self.recheck()
            return False
        self._enqueue(peer, frames, sizes, ticket, unsent)
        self.recheck()
        return True

    def _is_full(self, num_bytes: int) -> bool:
        return (
            self._num_queued_messages >= self.options.max_queued_messages
            or self._num_queued_bytes + num_bytes > self.options.max_queued_bytes
        )

    def _enqueue(
        self,
        peer: bytes,
        frames: Sequence[Any],
        sizes: list[int],
        ticket: SendTicket | None,
        parts: Sequence[Sequence[Any]] | None,
    ) -> None:
        queue = self._queues.setdefault(peer, deque())
        last = queue[-1] if queue and self._packs and ticket is None else None
        if last is None or not last.has_room(sizes):
            if queue and self._is_running:
                self._flush()
                queue = self._queues.setdefault(peer, deque())
            last = _Waiting(ticket, parts=parts)
            queue.append(last)
        last.messages.append((frames, sizes))
        last.num_bytes += sum(sizes)
        last.num_frames += len(sizes)
        self._num_queued_messages += 1
        self._num_queued_bytes += sum(sizes)

    def _as_sent(self, messages: _Messages) -> Sequence[Sequence[Any]]:
        """Return the zmq messages in which messages to one peer leave."""
        (first, sizes), num = messages[0], self._num_ids
        if self._packs and (len(messages) > 1 or len(first) >= num + 2):
            packed = pack_frames([(frames[num:], sizes[num:]) for frames, sizes in messages])
            first, sizes = [*first[:num], *packed], [*sizes[:num], *sizes_of(packed)]
        if self._partial is None or (len(first) == num + 1 and sizes[-1] <= PART_BYTES):
            return (first,)
        self._num_sent += 1
        return [[*first[:num], *part] for part in parts_of(first[num:], self._num_sent)]

    def _split(self, frames: list[Frame]) -> Sequence[list[Frame]]:
        ids, first = frames[: self._num_ids], frames[self._num_ids : self._num_ids + 1]
        if self._partial is not None:
            peer = bytes(ids[0]) if ids else b""
            if self._connections is not None and (fd := self._sender_fd()) is not None:
                self._connections.read(fd)
                self._fds[peer] = fd
            if first and first[0][:2] == PART:
                try:
                    whole = self._partial.add(peer, frames[self._num_ids :])
                except WireError as error:
                    self._refuse_sender(str(error))
                    return ()
                if whole is None:
                    return ()
                frames = [*ids, *whole]
                first = frames[self._num_ids : self._num_ids + 1]
            elif len(frames) > self._num_ids + 1:
                self._refuse_sender("a message over TCP has one frame, or is a part of one")
                return ()
        if self._packs and first and first[0][:2] == PACKED:
            with contextlib.suppress(WireError):  # left to the receiver, who refuses it
                messages = unpack_frames(frames[self._num_ids :])
                return [[*ids, *message] for message in messages] if ids else messages
        return (frames,)

    def _try_send_all(
        self, parts: Sequence[Sequence[Any]], ticket: SendTicket | None
    ) -> Sequence[Sequence[Any]]:
        """Pass zmq messages to libzmq; return those for which it has no room now."""
        last = len(parts) - 1
        for index, part in enumerate(parts):
            if not self._try_send(part, ticket if index == last else None):
                return parts[index:]
        return ()

    def _try_send(self, frames: Sequence[Any], ticket: SendTicket | None) -> bool:
        """Pass one message to libzmq; return False if it has no room now."""
        raw_send = self._raw.send
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            flags = _LAST if index == last else _MORE
            if ticket is not None and index == last:  # frames leave in order
                frame = zmq.Frame(frame, track=True, copy_threshold=0)  # small ones, too
                ticket._tracker = frame.tracker
            elif type(frame) is memoryview:
                owner: Any = frame.obj
                if type(owner) is zmq.Frame and frame.nbytes == len(owner):
                    frame = owner  # received and forwarded whole: share the message instead of copying it
            try:
                raw_send(frame, flags, copy=False)
            except zmq.Again:
                # After the first frame this means that the peer disconnected within the message: libzmq discards
                # the remaining frames, and the whole message must be sent again.
                if 0 < index < last:
                    for rest in range(index + 1, last + 1):
                        raw_send(b"", _LAST if rest == last else _MORE)
                return False
            except zmq.ZMQError as error:
                raise self._explain(error, frames) from error
        if ticket is not None:
            ticket._is_queued = False
        return True

    def _explain(self, error: zmq.ZMQError, frames: Sequence[Any]) -> Exception:
        if error.errno == zmq.EHOSTUNREACH:
            return PeerLostError(f"{self.name}: no peer {bytes(frames[0])!r} is connected")
        if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
            return ClosedError(f"{self.name} is closed")
        return error

    def _has_work(self) -> bool:
        return super()._has_work() or bool(self._queues and self._get(_EVENTS) & _POLLOUT)

    def _flush(self) -> None:
        self._has_sent_to.clear()
        if not self._queues or not self._get(_EVENTS) & _POLLOUT:
            return
        num_left = self._max_per_tick
        for peer, queue in list(self._queues.items()):
            while queue and num_left > 0:
                waiting = queue[0]
                try:
                    parts = self._as_sent(waiting.messages) if waiting.parts is None else waiting.parts
                    if unsent := self._try_send_all(parts, waiting.ticket):
                        waiting.parts = unsent if len(unsent) < len(parts) else waiting.parts
                        break
                except PeerLostError:  # it was there a moment ago: lost with it, as if sent then
                    if waiting.ticket is not None:
                        waiting.ticket._is_queued, waiting.ticket._tracker = False, zmq.MessageTracker()
                queue.popleft()
                num_left -= len(waiting.messages)
                self._num_queued_messages -= len(waiting.messages)
                self._num_queued_bytes -= waiting.num_bytes
            if not queue:
                del self._queues[peer]

    # -- sender and close ------------------------------------------------------------------------------

    @property
    def sender_role(self) -> str | None:
        """The role of the sender's key, None without keys; valid inside ``on_message``."""
        return self._sender_property("User-Id")

    @property
    def sender_address(self) -> str | None:
        """The sender's network address, None over ipc; valid inside ``on_message``."""
        return self._sender_property("Peer-Address")

    def _sender_fd(self) -> int | None:
        try:
            return None if self._first_frame is None else int(self._first_frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None

    def _sender_property(self, key: str) -> str | None:
        if self._first_frame is None:
            return None
        try:
            return str(self._first_frame.get(key)) or None
        except zmq.ZMQError:
            return None

    # -- bounds of connections -----------------------------------------------------------------------

    def _on_excess(self) -> None:
        self._refuse_sender("its messages have more frames than a message over TCP")

    def _refuse_sender(self, reason: str) -> None:
        """Cut the connection of the message that is being read."""
        if self._connections is not None and (fd := self._sender_fd()) is not None:
            self._connections.cut(fd, reason)

    def _cut(self, fd: int, address: str, reason: str, is_let_in: bool) -> None:
        routing = next((peer for peer, its in self._fds.items() if its == fd), b"")
        if self._on_cut is not None:
            self._on_cut(address, routing, reason, is_let_in)

    def _connection_changed(self, event: SocketEvent) -> None:
        if self._connections is not None:
            self._connections.on_event(event)
            if event.kind == "disconnected" and self._num_ids:
                for peer in [peer for peer, fd in self._fds.items() if fd == event.code]:
                    del self._fds[peer]
                    if self._partial is not None:
                        self._partial.forget(peer)
        if self._on_event is not None and event.kind != "opened":
            self._on_event(event)

    def take_moving(self) -> list[bytes]:
        """Return the TCP peers from which data arrived since the last call, complete or not; b"" on a DEALER."""
        if self._connections is None or not (moving := self._connections.take_moving()):
            return []
        return [peer for peer, fd in self._fds.items() if fd in moving]

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._raw.closed

    def close(self, linger_ms: int | None = None) -> None:
        """Close the socket. Idempotent.

        Args:
            linger_ms: How long libzmq keeps delivering its queued messages in the background;
                the options' ``linger_ms`` if None. The socket's own queue is dropped.
        """
        if self._raw.closed:
            return
        if self._is_running:
            self._flush()
        self.detach()
        self._queues.clear()
        self._num_queued_messages = self._num_queued_bytes = 0
        if self._monitor is not None:
            self._monitor.close()
        if self._connections is not None:
            self._connections.close()
        self._raw.close(self.options.linger_ms if linger_ms is None else linger_ms)
        self._context.forget(self)
        for lock in self._locks:
            lock.release()

    def _check_usable(self) -> None:
        if self._raw.closed:
            raise ClosedError(f"{self.name} is closed")
        if threading.get_ident() != self._thread_id:
            raise RuntimeError(
                f"{self.name} belongs to thread {self._thread_id} and was used from {threading.get_ident()}: "
                "pass the message with loop.call_soon_threadsafe"
            )


def _describe_bind_error(error: zmq.ZMQError, address: str) -> str:
    """Describe why a bind failed and what to try."""
    if error.errno == errno.EADDRINUSE:
        port = address.rpartition(":")[2]
        return f"another process listens there: end it (ss -ltnp 'sport = :{port}' names it), or choose another port"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine has no such address: use one of its addresses (ip address)"
    return str(error.strerror or error)
