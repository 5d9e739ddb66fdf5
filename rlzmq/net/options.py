"""The options of every socket: one set per kind of channel, each value with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

__all__ = ["CONTROL", "SocketOptions"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Bounds and timers of one socket.

    Every value is finite on purpose: libzmq's defaults wait forever (linger), accept messages of any
    size. Half-open connections are found by `rlzmq.net.connections`.

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
        handshake_interval_ms: A client that does not complete its handshake in this time is dropped.
        reconnect_interval_ms: First delay before connecting again; it doubles ...
        reconnect_interval_max_ms: ... up to this.
        connect_timeout_ms: An attempt to connect is abandoned after this time and repeated. The system's own
            retries become rare: after a cut of a minute they would wait for another half.
        immediate: Queue messages only for peers that are connected now (``ZMQ_IMMEDIATE``).
    """

    max_message_bytes: int = _MIB
    send_high_water_mark: int = 64
    receive_high_water_mark: int = 64
    max_queued_messages: int = 1024
    max_queued_bytes: int = 64 * _MIB
    linger_ms: int = 0
    handshake_interval_ms: int = 2000
    reconnect_interval_ms: int = 100
    reconnect_interval_max_ms: int = 5000
    connect_timeout_ms: int = 2500
    immediate: bool = False

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
        socket.set(zmq.HANDSHAKE_IVL, self.handshake_interval_ms)
        socket.set(zmq.RECONNECT_IVL, self.reconnect_interval_ms)
        socket.set(zmq.RECONNECT_IVL_MAX, self.reconnect_interval_max_ms)
        socket.set(zmq.CONNECT_TIMEOUT, self.connect_timeout_ms)
        if self.immediate:
            socket.set(zmq.IMMEDIATE, 1)
        if is_router:
            # Without MANDATORY a message to an unknown or dead peer vanishes silently; without HANDOVER
            # a peer that comes back under its old routing id is ignored forever.
            socket.set(zmq.ROUTER_MANDATORY, 1)
            socket.set(zmq.ROUTER_HANDOVER, 1)


CONTROL = SocketOptions()
"""Small messages: registration, leases, acknowledgements, calls."""
