"""Figures of the actor system: start-up, calls, deaths, memory. Run: python scripts/bench_actors.py"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

START = time.perf_counter()

from rlzmq.actors import forkserver  # noqa: E402

forkserver.prestart()

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from rlzmq.actors.system import ActorSystem  # noqa: E402

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


async def main() -> None:
    async with ActorSystem() as system:
        first = await system.spawn(Echo)
        print(f"process start to the first actor ready      {time.perf_counter() - START:8.2f} s")
        ready, stopped = [], []
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            actors = await asyncio.gather(*(system.spawn(Echo) for _ in range(4)))
            ready.append(time.perf_counter() - start)
            start = time.perf_counter()
            await asyncio.gather(*(actor.stop() for actor in actors))
            stopped.append(time.perf_counter() - start)
        print(f"four more ready, median of {NUM_ROUNDS} (best)            "
              f"{statistics.median(ready):8.3f} s ({min(ready):.3f})")  # fmt: skip
        print(f"the four stopped, median                    {statistics.median(stopped):8.3f} s")
        memory = psutil.Process(first.pid).memory_full_info()
        print(f"private memory of one actor                 {memory.uss / 2**20:8.0f} MiB")
        print(
            f"call and answer, blocking method            {await measure(lambda: first.echo(1), 500) * 1e6:8.0f} µs"
        )
        on_loop = await measure(lambda: first.echo_on_loop(1), 500)
        print(f"call and answer, async method               {on_loop * 1e6:8.0f} µs")
        start = time.perf_counter()
        await asyncio.gather(*(first.echo(1) for _ in range(2000)))
        print(
            f"calls in flight together                    {2000 / (time.perf_counter() - start):8.0f} calls/s"
        )
        array = np.zeros(10_000_000, np.uint8)
        seconds = await measure(lambda: first.echo(array), 10)
        print(f"10 MB there and back                        {seconds * 1e3:8.1f} ms")
        noticed = []
        for _ in range(NUM_ROUNDS):
            actor = await system.spawn(Echo)
            os.kill(actor.pid, signal.SIGKILL)
            start = time.perf_counter()
            await actor.exited
            noticed.append(time.perf_counter() - start)
        print(f"kill -9 noticed, median                     {statistics.median(noticed) * 1e3:8.1f} ms")


asyncio.run(main())
