"""Length-prefixed messages on the socketpair between a parent and its own child."""

from __future__ import annotations

import asyncio
import socket
import struct

__all__ = ["receive", "receive_blocking", "send"]

_LENGTH = struct.Struct("<Q")


async def send(channel: socket.socket, data: bytes) -> None:
    """Send one message; wait while the other side is slow. Only one sender may be active at a time.

    Raises:
        OSError: The other side is gone.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(channel, _LENGTH.pack(len(data)))
    await loop.sock_sendall(channel, data)


async def receive(channel: socket.socket) -> bytes | None:
    """Receive the next message; return None at the end of the stream."""
    loop = asyncio.get_running_loop()
    head = await _receive_exactly(loop, channel, _LENGTH.size)
    return None if head is None else await _receive_exactly(loop, channel, _LENGTH.unpack(head)[0])


def receive_blocking(channel: socket.socket) -> bytes | None:
    """Do the same as :func:`receive`, for a child that has no event loop yet."""
    head = channel.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = channel.recv(size, socket.MSG_WAITALL)
    return data if len(data) == size else None


async def _receive_exactly(
    loop: asyncio.AbstractEventLoop, channel: socket.socket, num_bytes: int
) -> bytes | None:
    data = bytearray(num_bytes)
    view = memoryview(data)
    received = 0
    while received < num_bytes:
        count = await loop.sock_recv_into(channel, view[received:])
        if count == 0:
            return None
        received += count
    return bytes(data)
