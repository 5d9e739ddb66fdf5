"""A proxy between zmq sockets that misbehaves on request: seedable, frame-aware, counts what it did.

It forwards TCP or Unix connections. Faults on bytes: black hole, cut, rate. Faults on whole ZMTP messages (NULL or
CURVE; read from the framing, contents untouched): duplicate. Every fault that fired is counted in ``fired``, so that
a test can prove that it tested something.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass
class Faults:
    """What happens to one direction; may be changed while traffic flows. ``duplicate`` is a probability per message."""

    rate_bytes_per_s: float = 0.0
    black_hole: bool = False
    duplicate: float = 0.0


@dataclass
class ChaosProxy:
    """Listens on ``listen`` and forwards to ``upstream``; both are zmq addresses (tcp or ipc).

    TCP port 0 listens on a free port; ``address`` says which.
    """

    upstream: str
    listen: str = "tcp://127.0.0.1:0"
    seed: int = 0
    to_server: Faults = field(default_factory=Faults)
    to_client: Faults = field(default_factory=Faults)
    address: str = ""
    fired: Counter[str] = field(default_factory=Counter)

    async def __aenter__(self) -> ChaosProxy:
        self._random = random.Random(self.seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        scheme, _, rest = self.listen.partition("://")
        if scheme == "ipc":
            self._server = await asyncio.start_unix_server(self._accept, rest)
            self.address = self.listen
        else:
            host, _, port = rest.rpartition(":")
            self._server = await asyncio.start_server(self._accept, host, int(port))
            self.address = f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.listen.startswith("ipc://"):
            os.unlink(self.listen[6:])

    @property
    def num_connections(self) -> int:
        return len(self._writers) // 2

    def cut(self) -> int:
        """Breaks every connection now (TCP: with a reset); returns how many there were."""
        num = self.num_connections
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self.fired["cut"] += num
        return num

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scheme, _, rest = self.upstream.partition("://")
        try:
            if scheme == "ipc":
                up_reader, up_writer = await asyncio.open_unix_connection(rest)
            else:
                host, _, port = rest.rpartition(":")
                up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        pair = {writer, up_writer}
        self._writers |= pair
        for name, source, sink, faults in (
            ("to_server", reader, up_writer, self.to_server),
            ("to_client", up_reader, writer, self.to_client),
        ):
            task = asyncio.create_task(self._carry(source, sink, faults), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._close(pair))

    def _close(self, pair: set[asyncio.StreamWriter]) -> None:
        for writer in pair:
            writer.close()
        self._writers -= pair

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, faults: Faults) -> None:
        try:
            async for data, is_message in _pieces(source, faults):
                if faults.black_hole:
                    self.fired["black_hole"] += 1
                    continue
                copies = 2 if is_message and self._random.random() < faults.duplicate else 1
                self.fired["duplicate"] += copies - 1
                for _ in range(copies):
                    if faults.rate_bytes_per_s:
                        await asyncio.sleep(len(data) / faults.rate_bytes_per_s)
                    sink.write(data)
                    await sink.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass


async def _pieces(source: asyncio.StreamReader, faults: Faults) -> AsyncIterator[tuple[bytes, bool]]:
    """Greeting and commands as they are; messages whole when a fault needs them so, else bytes."""
    if not faults.duplicate:
        while data := await source.read(65536):
            yield data, False
        return
    num_left = _GREETING_BYTES  # sent in parts, each waiting for the peer's
    while num_left and (data := await source.read(num_left)):
        num_left -= len(data)
        yield data, False
    message = b""
    while True:
        flags = await source.readexactly(1)
        size = await source.readexactly(8 if flags[0] & _LONG else 1)
        frame = flags + size + await source.readexactly(int.from_bytes(size, "big"))
        if flags[0] & _COMMAND and not _is_curve_message(frame):
            yield frame, False
            continue
        message += frame
        if not flags[0] & _MORE:
            yield message, True
            message = b""


def _is_curve_message(frame: bytes) -> bool:
    return b"\x07MESSAGE" in frame[:20]
