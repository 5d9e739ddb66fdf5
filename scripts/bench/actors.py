"""Figures of the actor system: start-up, calls, deaths, memory."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

NUM_ROUNDS = 5


class Echo:
    def __init__(self) -> None:
        import gymnasium
        import torch

        self.env = gymnasium.make("CartPole-v1")
        self.parameter = torch.zeros(1)

    def echo(self, value: Any) -> Any:
        return value

    async def echo_on_loop(self, value: Any) -> Any:
        return value


async def measure(function: Callable[[], Awaitable[Any]], num: int) -> float:
    """Seconds per await, best of three."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(num):
            await function()
        best = min(best, (time.perf_counter() - start) / num)
    return best


def report(options: argparse.Namespace) -> Iterator[str]:
    begin = time.perf_counter()
    from rlzmq.actors import forkserver

    forkserver.get_fork_server()
    yield from asyncio.run(figures(begin))


async def figures(begin: float) -> list[str]:
    import numpy as np
    import psutil

    from rlzmq.actors.system import ActorSystem

    lines = []
    async with ActorSystem() as system:
        first = await system.spawn(Echo)
        lines.append(f"from no process to the first actor ready     {time.perf_counter() - begin:8.2f} s")
        ready, stopped = [], []
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            actors = await asyncio.gather(*(system.spawn(Echo) for _ in range(4)))
            ready.append(time.perf_counter() - start)
            start = time.perf_counter()
            await asyncio.gather(*(actor.stop() for actor in actors))
            stopped.append(time.perf_counter() - start)
        lines.append(f"four more ready, median of {NUM_ROUNDS} (best)            "
              f"{statistics.median(ready):8.3f} s ({min(ready):.3f})")  # fmt: skip
        lines.append(f"the four stopped, median                    {statistics.median(stopped):8.3f} s")
        memory = psutil.Process(first.pid).memory_full_info()
        lines.append(f"private memory of one actor                 {memory.uss / 2**20:8.0f} MiB")
        lines.append(
            f"call and answer, blocking method            {await measure(lambda: first.echo(1), 500) * 1e6:8.0f} µs"
        )
        on_loop = await measure(lambda: first.echo_on_loop(1), 500)
        lines.append(f"call and answer, async method               {on_loop * 1e6:8.0f} µs")
        start = time.perf_counter()
        await asyncio.gather(*(first.echo(1) for _ in range(2000)))
        lines.append(
            f"calls in flight together                    {2000 / (time.perf_counter() - start):8.0f} calls/s"
        )
        array = np.zeros(10_000_000, np.uint8)
        seconds = await measure(lambda: first.echo(array), 10)
        lines.append(f"10 MB there and back                        {seconds * 1e3:8.1f} ms")
        noticed = []
        for _ in range(NUM_ROUNDS):
            actor = await system.spawn(Echo)
            psutil.Process(actor.pid).kill()
            start = time.perf_counter()
            await actor.exited
            noticed.append(time.perf_counter() - start)
        lines.append(
            f"kill -9 noticed, median                     {statistics.median(noticed) * 1e3:8.1f} ms"
        )
    return lines
