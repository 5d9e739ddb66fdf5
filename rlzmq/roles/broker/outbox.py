"""Bounded queues of messages to external peers, which may never read them.

The ROUTER queues without limit, because with a limit a slow peer would block the others. Here each peer has a budget
of small messages and bytes. Large messages (the config, snapshots of the weights, a long status) are sent one at a
time; of those that wait, the newest of each kind is kept, in the broker's own buffer. Within its budget a peer that
reads never waits for one that does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlzmq.core.errors import PeerLostError
from rlzmq.net.socket import SendTicket

__all__ = ["Outbox"]

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
