"""NarrowPath: a TCP proxy on a path whose MTU is smaller than its ends believe, so that full packets are lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Self


class NarrowPath:
    """Forwards TCP connections on a thread. Each direction of one is silent from its first full packet on.

    Args:
        ports: The ports to forward to.
        packet_bytes: More than that at once is a full packet.

    Attributes:
        ports: Port forwarded to → port to connect to instead; set in the block.
        num_lost: Number of directions that have become silent.
    """

    def __init__(self, *ports: int, packet_bytes: int) -> None:
        self._packet_bytes = packet_bytes
        self.ports: dict[int, int] = dict.fromkeys(ports, 0)
        self.num_lost = 0
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="narrow path")

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        for port in self.ports:

            async def forward(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                with contextlib.suppress(asyncio.CancelledError):  # asyncio's streams would log it
                    await self._forward(reader, writer, port)

            server = await asyncio.start_server(forward, "127.0.0.1", 0)
            self._servers.append(server)
            self.ports[port] = server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._carry(reader, there[1]))
                directions.create_task(self._carry(there[0], writer))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            there[1].close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_silent = False
        while data := await reader.read(1 << 16):
            # what follows it waits for it at the other end
            if len(data) > self._packet_bytes and not is_silent:
                is_silent = True
                self.num_lost += 1
            if not is_silent:
                writer.write(data)
        raise ConnectionError("closed by one end")
