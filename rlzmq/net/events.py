"""Events of a socket's connections: libzmq's monitor events, as callbacks on the event loop."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import zmq

from rlzmq.net.edge_reader import EdgeReader, Frame

__all__ = ["EventHandler", "SocketEvent", "SocketMonitor"]

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
