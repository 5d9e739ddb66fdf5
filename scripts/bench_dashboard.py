"""What an open page costs a run: a broker with many runners, its page open and closed by turns.

    python scripts/bench_dashboard.py                       # 64 runners, 6 turns of 5 s
    python scripts/bench_dashboard.py --runners 2000 --turns 2

Broker, runners, learner and driver are the protocol's own, on real sockets in one process that is always busy, without
envs and networks: so every microsecond that the page takes from the broker shows. The cost is processor time per
update, which other processes of the machine change less than updates per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlzmq.roles.broker.broker_role import BrokerRole
from tests.driver.broker_peers import FakeDriver, FakeLearner, FakePeer, FakeRunner
from tests.telemetry.dashboards import Served

_READS = (
    "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1])); "
    "c.request('GET', '/api/stream?run=r0', headers={'Cookie': sys.argv[2]}); r = c.getresponse()\n"
    "while r.readline(): pass"
)
_ENOUGH_UPDATES = 10_000_000
_SETTLE_S = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runners", type=int, default=64, help="(default: 64)")
    parser.add_argument("--turns", type=int, default=6, help="with and without a page (default: 6)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn (default: 5)")
    asyncio.run(measure(parser.parse_args()))


async def measure(options: argparse.Namespace) -> None:
    broker = BrokerRole("run", {"peer_timeout_s": 60.0})
    addresses = await broker.start()
    runners = [FakeRunner(f"runner-{index}", addresses) for index in range(options.runners)]
    learner = FakeLearner(addresses)
    await asyncio.sleep(_SETTLE_S)
    driver = FakeDriver(addresses, _ENOUGH_UPDATES, 10 * options.runners, staleness=1, max_policy_lag=1)
    peers: list[FakePeer] = [*runners, learner, driver]
    with tempfile.TemporaryDirectory() as place:
        served = await asyncio.to_thread(Served, Path(place), addresses["data"])
        try:
            await asyncio.to_thread(served.enter)
            await asyncio.sleep(2 * _SETTLE_S)
            await compare(options, broker, driver, served)
        finally:
            served.process.terminate()
            served.process.communicate()
    for peer in peers:
        await peer.close()
    await broker.stop()


async def compare(
    options: argparse.Namespace, broker: BrokerRole, driver: FakeDriver, served: Served
) -> None:
    page = psutil.Process(served.process.pid)
    costs: dict[bool, list[float]] = {False: [], True: []}
    page_cpu: dict[bool, list[float]] = {False: [], True: []}
    command = [sys.executable, "-c", _READS, str(served.port), served.cookie]
    for turn in range(2 * options.turns):
        is_open = bool((turn + 1) // 2 % 2)  # off on, on off, …
        reader = await asyncio.create_subprocess_exec(*command) if is_open else None
        await asyncio.sleep(_SETTLE_S)
        before = time.process_time(), len(driver.reports), sum(page.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(options.seconds)
        after = time.process_time(), len(driver.reports), sum(page.cpu_times()[:2]), time.monotonic()
        cpu_s, num_updates, page_s, wall_s = (b - a for a, b in zip(before, after, strict=True))
        costs[is_open].append(cpu_s / num_updates)
        page_cpu[is_open].append(page_s / wall_s)
        if reader is not None:
            reader.terminate()
            await reader.wait()
    begin = time.process_time()
    for _ in range(100):
        await broker.status()
    status_s = (time.process_time() - begin) / 100
    means = {is_open: sum(values) / len(values) for is_open, values in costs.items()}
    spread = [open_ / shut for open_, shut in zip(costs[True], costs[False], strict=True)]
    print(
        f"{options.runners} runners, {options.turns} turns of {options.seconds:g} s each way, {os.cpu_count()} cores"
    )
    print(f"processor time per update: {means[False] * 1e3:.3f} ms, with the page open {means[True] * 1e3:.3f} ms: "
          f"{100 * (means[True] / means[False] - 1):+.2f} % (turns {100 * (min(spread) - 1):+.1f} to "
          f"{100 * (max(spread) - 1):+.1f} %)")  # fmt: skip
    print(
        f"a status, asked for once a second: {status_s * 1e3:.2f} ms of the broker, {100 * status_s:.3f} % of its core"
    )
    for is_open, what in ((False, "without"), (True, "with")):
        share = sum(page_cpu[is_open]) / len(page_cpu[is_open])
        print(f"the dashboard's process {what} a page open: {100 * share:.1f} % of a core")
    total = (status_s + share) / (os.cpu_count() or 1)
    print(f"broker and dashboard together, of this machine's cores: {100 * total:.2f} %")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
