"""A proxy between zmq sockets that misbehaves on request: seedable, frame-aware, counts what it did.

It forwards TCP or Unix connections. Faults on bytes: delay, black hole, cut, half-close, rate. Faults on
whole ZMTP messages (NULL or CURVE; read from the framing, contents untouched): drop, duplicate, reorder.
Every fault that fired is counted in ``fired``, so that a test can prove that it tested something.
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
    """What happens to one direction; may be changed while traffic flows.

    ``drop``, ``duplicate`` and ``reorder`` are probabilities per message.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate_bytes_per_s: float = 0.0
    black_hole: bool = False
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    @property
    def needs_messages(self) -> bool:
        return bool(self.drop or self.duplicate or self.reorder)


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

    def half_close(self) -> None:
        """Ends the stream towards the clients; the other direction stays open."""
        for task in self._tasks:
            if task.get_name() == "to_client":
                task.cancel()
                self.fired["half_close"] += 1

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
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        writing = asyncio.create_task(self._write(sink, due, faults))
        loop = asyncio.get_running_loop()
        held: bytes | None = None  # a message that the next one overtakes
        try:
            async for data, is_message in _pieces(source, faults):
                if faults.black_hole:
                    self.fired["black_hole"] += 1
                    continue
                delay = faults.delay_s + faults.jitter_s * self._random.random()
                if delay:
                    self.fired["delay"] += 1
                pieces = [data]
                if is_message:
                    pieces, held = self._tamper(data, held, faults)
                for piece in pieces:
                    due.put_nowait((loop.time() + delay, piece))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _tamper(self, data: bytes, held: bytes | None, faults: Faults) -> tuple[list[bytes], bytes | None]:
        chance = self._random.random
        if chance() < faults.drop:
            self.fired["drop"] += 1
            return ([held] if held else []), None
        if held is None and chance() < faults.reorder:
            return [], data
        pieces = [data]
        if held is not None:
            self.fired["reorder"] += 1
            pieces.append(held)
        if chance() < faults.duplicate:
            self.fired["duplicate"] += 1
            pieces.append(data)
        return pieces, None

    async def _write(
        self, sink: asyncio.StreamWriter, due: asyncio.Queue[tuple[float, bytes]], faults: Faults
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                at, data = await due.get()
                wait = max(at - loop.time(), 0.0)
                if faults.rate_bytes_per_s:
                    wait += len(data) / faults.rate_bytes_per_s
                if wait > 0:
                    await asyncio.sleep(wait)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass


async def _pieces(source: asyncio.StreamReader, faults: Faults) -> AsyncIterator[tuple[bytes, bool]]:
    """Greeting and commands as they are; messages whole when a fault needs them so, else bytes."""
    if not faults.needs_messages:
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
