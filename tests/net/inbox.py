"""Inbox: a socket's handler that keeps messages until a test takes them."""

from __future__ import annotations

import asyncio
from typing import Any

from rlzmq.net.context import SocketOptions

DEADLINE_S = 20
CHUNKS = SocketOptions(max_message_bytes=64 << 20, linger_ms=2000, max_queued_bytes=256 << 20)


class Inbox:
    """Collects messages; ``await inbox.get()`` is the next one, ``await inbox.take(n)`` the next n."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[list[Any]] = asyncio.Queue()

    def __call__(self, frames: list[Any]) -> None:
        self.queue.put_nowait(frames)

    async def get(self) -> list[Any]:
        return (await self.take(1))[0]

    async def take(self, num: int) -> list[list[Any]]:
        async with asyncio.timeout(DEADLINE_S):
            return [await self.queue.get() for _ in range(num)]
