"""What several tests of sockets need."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import Context, SocketOptions


@pytest.fixture
def context() -> Iterator[Context]:
    with Context() as context:
        yield context


@pytest.fixture
def directory() -> Iterator[SocketDirectory]:
    with SocketDirectory() as directory:
        yield directory


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
