"""The broker's sockets: a door for local peers, and a door with keys for external peers.

Each door is a ROUTER and a PUB. The core identifies a local peer by ``L`` and its routing id, and an external peer
by ``R``, the role of its key, ``|`` and its routing id. So a peer cannot take over the identity of a peer with
another role by using its routing id.

The ROUTER queues without limit, because with a limit a slow peer would block the others. Here each peer has a budget
of small messages and bytes. Large messages (the config, snapshots of the weights, a long status) are sent one at a
time; of those that wait, the newest of each kind is kept, in the broker's own buffer. Within its budget a peer that
reads never waits for one that does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlzmq.core.errors import PeerLostError
from rlzmq.net.context import Context, SocketOptions, raise_file_limit
from rlzmq.net.events import SocketEvent
from rlzmq.net.keys import Authenticator, CurveServer
from rlzmq.net.shared_memory import SharedFrames
from rlzmq.net.socket import DrainSocket, SendTicket
from rlzmq.wire.codec import Buffer, notice_of, open_publication

__all__ = ["MAX_MESSAGE_BYTES", "MAX_REMOTE_MESSAGE_BYTES", "BrokerListeners", "Outbox"]


# A runner has a few leases and acknowledgements in flight, and gets two heartbeats per second.
_MAX_MESSAGES = 1024
_MAX_SMALL_BYTES = 4 << 20
_LARGE_BYTES = 64 << 10
# For all peers; beyond it, only peers without waiting messages are sent any.
_MAX_ALL_BYTES = 256 << 20
# Messages per ticket: a ticket for every message would double the cost of sending.
_LOOK_EVERY_MESSAGES = 32


@dataclass(slots=True)
class _Segment:
    """Messages up to one whose ticket shows that all of them were sent."""

    ticket: SendTicket
    num_messages: int
    num_bytes: int
    is_large: bool


@dataclass(slots=True)
class _Waiting:
    """Messages that one peer may not have read yet."""

    segments: deque[_Segment] = field(default_factory=deque)
    num_messages: int = 0
    num_small_bytes: int = 0
    has_large: bool = False
    tail_messages: int = 0
    tail_bytes: int = 0
    deferred: dict[int, Sequence[Any]] = field(default_factory=dict)


class Outbox:
    """Sends messages within the budgets.

    Args:
        send: Passes a peer's frames to its socket, with a ticket or None; raises PeerLostError if the peer is
            not connected.

    Attributes:
        num_bytes: Bytes of all messages whose tickets are not done.
    """

    def __init__(self, send: Callable[[bytes, Sequence[Any], SendTicket | None], None]) -> None:
        self._send = send
        self._peers: dict[bytes, _Waiting] = {}
        self.num_bytes: int = 0

    def send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Send a message, or defer it if it is large.

        Args:
            peer: The peer's name in the core.
            frames: Frames of the message, whose kind is the second byte of the first.

        Returns:
            False if the budget is exhausted and the message was dropped.

        Raises:
            PeerLostError: The peer is no longer connected.
        """
        waiting = self._peers.get(peer)
        if waiting is None:
            waiting = self._peers[peer] = _Waiting()
        self._look(waiting)
        num_bytes = sum(memoryview(frame).nbytes for frame in frames)
        is_full = bool(waiting.segments) and self.num_bytes + num_bytes > _MAX_ALL_BYTES
        if num_bytes >= _LARGE_BYTES:
            if waiting.has_large or is_full:
                waiting.deferred[frames[0][1]] = frames
                return True
        elif (
            is_full
            or waiting.num_messages >= _MAX_MESSAGES
            or waiting.num_small_bytes + num_bytes > _MAX_SMALL_BYTES
        ):
            return False
        self._hand_over(peer, waiting, frames, num_bytes)
        return True

    def flush(self) -> None:
        """Send deferred messages whose predecessors were sent; forget peers without waiting messages."""
        for peer, waiting in list(self._peers.items()):
            self._look(waiting)
            if waiting.deferred and not waiting.has_large:
                kind = next(iter(waiting.deferred))
                frames = waiting.deferred.pop(kind)
                try:
                    self.send(peer, frames)
                except PeerLostError:
                    continue  # `_hand_over` forgot it
            elif not waiting.segments:  # at most a few small ones are left; the next one has a ticket
                del self._peers[peer]

    # ------------------------------------------------------------------ private

    def _hand_over(self, peer: bytes, waiting: _Waiting, frames: Sequence[Any], num_bytes: int) -> None:
        is_large = num_bytes >= _LARGE_BYTES
        waiting.tail_messages += 1
        waiting.tail_bytes += num_bytes
        ticket = None
        is_due = waiting.tail_messages >= _LOOK_EVERY_MESSAGES or waiting.tail_bytes >= _LARGE_BYTES
        if is_due or not waiting.segments:
            ticket = SendTicket()
        try:
            self._send(peer, frames, ticket)
        except PeerLostError:
            self._forget(peer)
            raise
        if ticket is None:
            return
        segment = _Segment(ticket, waiting.tail_messages, waiting.tail_bytes, is_large)
        waiting.tail_messages = waiting.tail_bytes = 0
        waiting.segments.append(segment)
        waiting.num_messages += segment.num_messages
        waiting.num_small_bytes += 0 if is_large else segment.num_bytes
        waiting.has_large |= is_large
        self.num_bytes += segment.num_bytes

    def _look(self, waiting: _Waiting) -> None:
        while waiting.segments and waiting.segments[0].ticket.done:
            self._left(waiting, waiting.segments.popleft())

    def _left(self, waiting: _Waiting, segment: _Segment) -> None:
        waiting.num_messages -= segment.num_messages
        waiting.num_small_bytes -= 0 if segment.is_large else segment.num_bytes
        waiting.has_large &= not segment.is_large
        self.num_bytes -= segment.num_bytes

    def _forget(self, peer: bytes) -> None:
        waiting = self._peers.pop(peer)
        for segment in waiting.segments:
            self.num_bytes -= segment.num_bytes


_log = logging.getLogger("rlzmq.broker")

# Delays of the probes that find out which peer's connection broke.
_PROBES_S = (0.01, 0.1)
MAX_MESSAGE_BYTES = 1 << 30
"""Of one frame: a column of a fragment, or a whole model's weights."""
# Unread messages of an external peer after which libzmq stops reading from it.
_MAX_UNREAD_MESSAGES = 64
MAX_REMOTE_MESSAGE_BYTES = 1 << 29
"""Of an external peer; all its frames together."""

# Larger weights are announced to external runners, of which one for each host requests them.
_MAX_PUSHED_BYTES = 16 * 1024

_LOCAL, _REMOTE = b"L", b"R"
# Learners and the driver are trusted, and messages to them are bounded by credits.
_BUDGETED_ROLES = ("runner", "observer", "nobody")
_BUDGETED = tuple(_REMOTE + role.encode() for role in _BUDGETED_ROLES)


class BrokerListeners:
    """The broker's local and external sockets; methods never block.

    Args:
        on_message: Called with a peer's name, the role of its key (None for a local peer), and the frames of
            its message.
        on_broken: Called shortly after an external connection broke; sending shows whose it was.
    """

    def __init__(
        self,
        on_message: Callable[[bytes, str | None, Sequence[Any]], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_broken = on_broken
        self._context = Context()
        self._routers: dict[bytes, DrainSocket] = {}
        self._publishers: dict[bytes, DrainSocket] = {}
        self._authenticator: Authenticator | None = None
        self._failed_handshakes: Counter[str] = Counter()
        self._num_connections: Counter[str] = Counter()
        self._is_probing = False
        self._outbox = Outbox(self._send_now)
        self._shared = SharedFrames(self._answer, self._on_frames_needed)

    def open(
        self,
        local: dict[str, str],
        listen: dict[str, str] | None,
        curve: CurveServer | None,
        roles: dict[str, str],
    ) -> dict[str, str]:
        """Listen; for arguments and result see `BrokerRole` and `BrokerRole.start`."""
        addresses = self._open(_LOCAL, local, MAX_MESSAGE_BYTES, None)
        if listen is not None:
            self._authenticator = Authenticator(self._context, roles)
            remote = self._open(_REMOTE, listen, MAX_REMOTE_MESSAGE_BYTES, curve)
            addresses |= {f"remote_{name}": address for name, address in remote.items()}
        return addresses

    def send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Send to a peer by the door of its connection.

        Returns:
            False if the message was dropped because an external runner or observer does not read.

        Raises:
            PeerLostError: The peer is no longer connected.
            ProtocolError: The message is too large for the wire.
        """
        if peer.startswith(_BUDGETED):
            return self._outbox.send(peer, frames)
        self._send_now(peer, frames, None)
        return True

    def when_read(self, peer: bytes, callback: Callable[[], None]) -> None:
        """Call a function once, after all messages that have arrived at the peer's door by now were handled."""
        self._routers[peer[:1]].when_read(callback)

    def take_moving(self, peers: Iterable[bytes]) -> list[bytes]:
        """Return the external peers from which data arrived since the last call, complete or not.

        Args:
            peers: The peers.
        """
        if _REMOTE not in self._routers or not (moving := self._routers[_REMOTE].take_moving()):
            return []
        return [peer for peer in peers if self.is_from_outside(peer) and peer.partition(b"|")[2] in moving]

    def flush(self) -> None:
        """Send deferred large messages; to be called regularly."""
        self._outbox.flush()

    def publish(self, frame: Buffer) -> None:
        """Publish to all subscribers, local and external.

        Local ones get the place of a frame in shared memory, until a peer cannot open one; a runner then requests it.
        External ones get a notice of weights that are not small, and request them for their next lease.
        """
        for door, publisher in self._publishers.items():
            if door == _REMOTE and memoryview(frame).nbytes > _MAX_PUSHED_BYTES:
                publisher.send([notice_of(open_publication(frame)[0])])
                continue
            folded = self._shared.fold(b"", [b"", frame]) if door == _LOCAL else [frame]
            publisher.send([frame] if folded[-1] is frame else folded)

    def origin_of(self, peer: bytes) -> str:
        """Return the role and address of the sender, or "" for a local peer; to be called within `on_message`."""
        if not self.is_from_outside(peer):
            return ""
        return f"{peer[1:].partition(b'|')[0].decode()} at {self._routers[_REMOTE].sender_address}"

    @staticmethod
    def is_from_outside(peer: bytes) -> bool:
        """Return whether the peer is external."""
        return peer[:1] == _REMOTE

    def counts(self) -> dict[str, Any]:
        """Return counts of external connections; {} if there is no external door.

        Connections opened but not let in were refused, or are within the handshake's two seconds.
        """
        if self._authenticator is None:
            return {}
        return {
            "opened": self._num_connections["accepted"],
            "let_in": self._num_connections["connected"],
            "refused_keys": self._authenticator.num_refused,
            "failed_handshakes": dict(self._failed_handshakes),
            "cut": self._num_connections["cut"],
            "unread_bytes": self._outbox.num_bytes,
        }

    def close(self) -> None:
        """Close the sockets; sent messages are still delivered until `wait_closed` returns."""
        for socket in (*self._routers.values(), *self._publishers.values()):
            socket.close()
        if self._authenticator is not None:
            self._authenticator.close()

    async def wait_closed(self) -> None:
        """Wait after `close` until sent messages are delivered, or the linger time is over."""
        await self._context.aclose()

    # ------------------------------------------------------------------ private

    def _send_now(self, peer: bytes, frames: Sequence[Any], ticket: SendTicket | None) -> None:
        door = peer[:1]
        if door == _LOCAL:
            routing = peer[1:]
            frames = self._shared.fold(routing, frames)
        else:
            routing = peer.partition(b"|")[2]
        self._routers[door].send([routing, *frames], ticket)

    def _answer(self, routing: bytes, frames: Sequence[Any]) -> None:
        with contextlib.suppress(PeerLostError):
            self._routers[_LOCAL].send([routing, *frames])

    def _on_frames_needed(self, routing: bytes, reason: str) -> None:
        _log.warning("%r gets large messages through the socket, not in shared memory: %s.", routing, reason)

    def _open(
        self, door: bytes, wanted: dict[str, str], max_message_bytes: int, curve: CurveServer | None
    ) -> dict[str, str]:
        """Open a door: the local one without keys, the external one with keys only."""
        data = SocketOptions(max_message_bytes=max_message_bytes, linger_ms=500, receive_high_water_mark=0)
        weights = SocketOptions(max_message_bytes=max_message_bytes, send_high_water_mark=1)
        if door == _REMOTE:
            data = replace(data, receive_high_water_mark=_MAX_UNREAD_MESSAGES)
        sockets = [
            DrainSocket(
                self._context,
                zmq_type,
                partial(self._on_frames, door) if zmq_type == "ROUTER" else None,
                options=options,
                curve=curve,
                on_event=self._on_connection if door == _REMOTE else None,
                on_cut=self._on_cut if door == _REMOTE else None,
                packs=zmq_type == "ROUTER",
                name=f"broker {name}",
            )
            for zmq_type, options, name in (("ROUTER", data, "data"), ("PUB", weights, "weights"))
        ]
        self._routers[door] = sockets[0]
        self._publishers[door] = sockets[1]
        return {
            name: socket.bind(wanted[name]) for name, socket in zip(("data", "weights"), sockets, strict=True)
        }

    def _on_frames(self, door: bytes, frames: list[Any]) -> None:
        routing = bytes(frames[0])
        if door == _REMOTE:
            role = self._routers[door].sender_role or "nobody"
            self._on_message(door + role.encode() + b"|" + routing, role, frames[1:])
        elif (message := self._shared.unfold(routing, frames[1:])) is not None:
            self._on_message(door + routing, None, message)

    def _on_connection(self, event: SocketEvent) -> None:
        self._num_connections[event.kind] += 1
        if event.kind == "accept_failed" and self._num_connections[event.kind] == 1:
            _log.error(
                "the broker cannot take another connection: %s. It holds %d; %d files may be open (ulimit -Hn).",
                os.strerror(event.code),
                self._num_connections["connected"] - self._num_connections["disconnected"],
                raise_file_limit(),
            )
        if event.kind == "handshake_failed":
            self._failed_handshakes[event.reason] += 1
        elif event.kind == "disconnected" and not self._is_probing:
            # The event may be ahead of the socket's own knowledge.
            self._is_probing = True
            for delay_s in _PROBES_S:
                asyncio.get_running_loop().call_later(delay_s, self._probe, delay_s == _PROBES_S[-1])

    def _on_cut(self, address: str, routing: bytes, reason: str, is_let_in: bool) -> None:
        self._num_connections["cut"] += 1
        if not is_let_in or self._authenticator is None:
            if self._num_connections["cut"] == 1:
                _log.warning(
                    "a connection from %s without a key was cut: %s. More are counted.", address, reason
                )
            return
        roles = self._authenticator.roles_at(address)
        barred = [role for role in roles if role in _BUDGETED_ROLES]
        for role in barred:
            self._authenticator.bar(role, address)
        _log.error(
            "the connection %r from %s, which has the key of role %s, was cut: %s. %s",
            routing.decode(errors="replace"),
            address,
            " or ".join(roles),
            reason,
            f"This run takes no new connection from there with the key of role {' or '.join(barred)}."
            if barred
            else "",
        )

    def _probe(self, is_last: bool) -> None:
        self._is_probing = not is_last
        self._on_broken()
