"""The only module that pickles: it sends objects of the user's script from a process to its own child.

The bytes travel as length-prefixed messages over a private socketpair that only the two processes hold. Nothing that
came from a zmq socket, a file or another machine is ever unpickled. Classes and functions defined in ``__main__``, in
a notebook or inside a function travel by value, all others by import.
"""

from __future__ import annotations

import asyncio
import functools
import io
import pickle
import socket
from types import CodeType
from typing import Any

__all__ = ["dumps", "loads", "receive", "send"]

_LENGTH_BYTES, _PART_BYTES = 8, 1 << 20


@functools.cache
def _pickler() -> Any:
    """Return the class that pickles. Its import takes long, and a run in one process does not need it."""
    import cloudpickle  # type: ignore[import-untyped]

    table = cloudpickle.CloudPickler.dispatch_table

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        """Keep the file's name, which some versions of cloudpickle replace: a traceback needs it to show its lines."""
        kind, args = table[CodeType](code)
        return kind, tuple(code.co_filename if part == "<dynamic-code>" else part for part in args)

    return type("Pickler", (cloudpickle.CloudPickler,), {"dispatch_table": table | {CodeType: reduce_code}})


def dumps(value: object, what: str) -> bytes:
    """Pickle ``value``.

    Raises:
        TypeError: The value, or something that it refers to, cannot be pickled.
    """
    data = io.BytesIO()
    try:
        _pickler()(data, pickle.HIGHEST_PROTOCOL).dump(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{what} cannot be sent to another process: {error}. Make such objects (locks, open files, "
            "sockets, running environments) inside the actor instead"
        ) from error
    return data.getvalue()


def loads(data: bytes) -> Any:
    """Unpickle the result of the parent's :func:`dumps`; only call it with bytes from the private pipe."""
    return pickle.loads(data)


async def send(channel: socket.socket, data: bytes) -> None:
    """Send one message; wait while the other side is slow. Only one sender may be active at a time.

    Raises:
        OSError: The other side is gone.
    """
    await asyncio.get_running_loop().sock_sendall(channel, len(data).to_bytes(_LENGTH_BYTES, "little") + data)


async def receive(channel: socket.socket) -> bytes | None:
    """Receive the next message; return None at the end of the stream."""
    head = await _receive_exactly(channel, _LENGTH_BYTES)
    return None if head is None else await _receive_exactly(channel, int.from_bytes(head, "little"))


async def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while left := num_bytes - len(data):
        if not (part := await asyncio.get_running_loop().sock_recv(channel, min(left, _PART_BYTES))):
            return None
        data += part
    return bytes(data)
