"""The only module that pickles: it sends objects of the user's script from a process to its own child.

The bytes travel as length-prefixed messages over a private socketpair that only the two processes hold. Nothing that
came from a zmq socket, a file or another machine is ever unpickled. Classes and functions defined in ``__main__``, in
a notebook or inside a function travel by value, all others by import.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

__all__ = ["dumps", "loads", "receive", "send"]

_LENGTH = struct.Struct("<Q")


def dumps(value: object, what: str) -> bytes:
    """Pickle ``value``.

    Raises:
        TypeError: The value, or something that it refers to, cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{what} cannot be sent to another process: {error}. Make such objects (locks, open files, "
            "sockets, running environments) inside the actor instead"
        ) from error
    return data


def loads(data: bytes) -> Any:
    """Unpickle the result of the parent's :func:`dumps`; only call it with bytes from the private pipe."""
    return pickle.loads(data)


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
