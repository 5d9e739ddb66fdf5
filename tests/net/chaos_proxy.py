"""A proxy between zmq sockets that misbehaves on request, and counts what it did.

It forwards TCP or Unix connections: black hole, cut, rate.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field


@dataclass
class Faults:
    """What happens to one direction; may be changed while traffic flows."""

    rate_bytes_per_s: float = 0.0
    black_hole: bool = False


@dataclass
class ChaosProxy:
    """Listens on ``listen`` and forwards to ``upstream``; both are zmq addresses (tcp or ipc).

    TCP port 0 listens on a free port; ``address`` says which.
    """

    upstream: str
    listen: str = "tcp://127.0.0.1:0"
    to_server: Faults = field(default_factory=Faults)
    to_client: Faults = field(default_factory=Faults)
    address: str = ""

    async def __aenter__(self) -> ChaosProxy:
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

    def cut(self) -> None:
        """Breaks every connection now (TCP: with a reset)."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

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
            while data := await source.read(65536):
                if faults.black_hole:
                    continue
                if faults.rate_bytes_per_s:
                    await asyncio.sleep(len(data) / faults.rate_bytes_per_s)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
