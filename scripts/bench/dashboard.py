"""What an open page of the dashboard costs a run: a broker with many runners, its page open and closed by turns.

Broker, runners, learner and driver are the protocol's own, on real sockets in one process that is always busy,
without envs and networks: so every microsecond that the page takes from the broker shows. The cost is measured as
updates per second of many short turns, and as processor time per update, which other processes change less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlzmq.roles.broker.broker_role import BrokerRole
    from tests.driver.broker_peers import FakeDriver
    from tests.telemetry.dashboards import Served

_READS = (
    "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1])); "
    "c.request('GET', '/api/stream?run=r0', headers={'Cookie': sys.argv[2]}); r = c.getresponse()\n"
    "while r.readline(): pass"
)
_ENOUGH_UPDATES = 10_000_000
_SETTLE_S = 1.5
_BETWEEN_S = 1.0  # the reader of the page starts in it
_NUM_SAMPLES = 10_000


def add_options(parser: Any) -> None:
    parser.add_argument("--runners", type=int, default=64, help="(default: 64)")


def report(options: argparse.Namespace) -> Iterator[str]:
    yield from asyncio.run(measure(options.runners, options.turns or 60, options.seconds or 1.5))


async def measure(num_runners: int, turns: int, turn_s: float) -> list[str]:
    from rlzmq.roles.broker.broker_role import BrokerRole
    from tests.driver.broker_peers import FakeDriver, FakeLearner, FakePeer, FakeRunner
    from tests.telemetry.dashboards import Served

    broker = BrokerRole("run", {"peer_timeout_s": 60.0})
    addresses = await broker.start()
    runners = [FakeRunner(f"runner-{index}", addresses) for index in range(num_runners)]
    learner = FakeLearner(addresses)
    await asyncio.sleep(_SETTLE_S)
    driver = FakeDriver(addresses, _ENOUGH_UPDATES, 10 * num_runners, staleness=1, max_policy_lag=1)
    peers: list[FakePeer] = [*runners, learner, driver]
    with tempfile.TemporaryDirectory() as place:
        served = await asyncio.to_thread(Served, Path(place), addresses["data"])
        try:
            await asyncio.to_thread(served.enter)
            await asyncio.sleep(2 * _SETTLE_S)
            lines = await compare(turns, turn_s, broker, driver, served)
        finally:
            served.process.terminate()
            served.process.communicate()
    for peer in peers:
        await peer.close()
    await broker.stop()
    return [f"{num_runners} runners, {turns} turns of {turn_s:g} s each way, {os.cpu_count()} cores", *lines]


async def compare(
    turns: int, turn_s: float, broker: BrokerRole, driver: FakeDriver, served: Served
) -> list[str]:
    import psutil

    page = psutil.Process(served.process.pid)
    costs: dict[bool, list[float]] = {False: [], True: []}
    rates: dict[bool, list[float]] = {False: [], True: []}
    page_cpu: dict[bool, list[float]] = {False: [], True: []}
    command = [sys.executable, "-c", _READS, str(served.port), served.cookie]
    for turn in range(2 * turns):
        is_open = bool((turn + 1) // 2 % 2)  # off on, on off, …
        reader = await asyncio.create_subprocess_exec(*command) if is_open else None
        await asyncio.sleep(_BETWEEN_S)
        before = time.process_time(), len(driver.reports), sum(page.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(turn_s)
        after = time.process_time(), len(driver.reports), sum(page.cpu_times()[:2]), time.monotonic()
        cpu_s, num_updates, page_s, wall_s = (b - a for a, b in zip(before, after, strict=True))
        costs[is_open].append(cpu_s / num_updates)
        rates[is_open].append(num_updates / wall_s)
        page_cpu[is_open].append(page_s / wall_s)
        if reader is not None:
            reader.terminate()
            await reader.wait()
    begin = time.process_time()
    for _ in range(100):
        await broker.status()
    status_s = (time.process_time() - begin) / 100
    means = {is_open: sum(values) / len(values) for is_open, values in costs.items()}
    slower = [open_ / shut - 1 for open_, shut in zip(rates[True], rates[False], strict=True)]
    dearer = [open_ / shut - 1 for open_, shut in zip(costs[True], costs[False], strict=True)]
    shares = {is_open: sum(values) / len(values) for is_open, values in page_cpu.items()}
    total = (status_s + shares[True]) / (os.cpu_count() or 1)
    return [
        f"updates per second with the page open, in pairs of turns: {interval(slower)}",
        f"processor time per update ({means[False] * 1e3:.3f} ms), in pairs of turns: {interval(dearer)}",
        f"a status, asked for once a second: {status_s * 1e3:.2f} ms of the broker, {100 * status_s:.3f} % of its core",
        f"the dashboard's process: {100 * shares[False]:.1f} % of a core, "
        f"with the page open {100 * shares[True]:.1f} %",
        f"broker and dashboard together, of this machine's cores: {100 * total:.2f} %",
    ]


def interval(changes: list[float]) -> str:
    """Return the median change and its 95 % interval (bootstrap) as text."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(changes, k=len(changes))) for _ in range(_NUM_SAMPLES)
    )
    low, high = (medians[int(share * _NUM_SAMPLES)] for share in (0.025, 0.975))
    return (
        f"{100 * statistics.median(changes):+.2f} % (95 % interval {100 * low:+.2f} to {100 * high:+.2f} %)"
    )
