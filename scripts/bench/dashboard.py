"""What an open page of the dashboard costs a run: a broker with many runners, while a viewer connects and leaves.

Broker, runners, learner and driver are the protocol's own, on real sockets in one process that is always busy,
without envs and networks: so every microsecond that the page takes from the broker shows. One run goes on for all
turns; in every second turn a viewer reads the page's stream, in the order off on, on off, …, so that drifts cancel.
Each pair of turns gives one change of the messages per second that the broker handles (an update has about a hundred,
so they measure a short turn more finely). What other processes took meanwhile (``/proc/stat``) is
subtracted by a linear fit, so that a busy machine widens the interval instead of hiding the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from rlzmq.roles.broker_role import BrokerRole
    from tests.driver.broker_peers import FakeDriver
    from tests.telemetry.dashboards import Served

_VIEWER = """
import http.client, socket, sys, threading
def read(answer):
    try:
        while answer.readline(): pass
    except (OSError, ValueError): pass
for line in sys.stdin:
    if line == "open\\n":
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
        connection.request("GET", "/api/stream?run=r0", headers={"Cookie": sys.argv[2]})
        taken = connection.sock
        reader = threading.Thread(target=read, args=(connection.getresponse(),))
        reader.start()
    else:
        taken.shutdown(socket.SHUT_RDWR)
        reader.join()
"""
_ENOUGH_UPDATES = 10_000_000
_SETTLE_S = 1.5
_BETWEEN_S = 0.3  # the viewer connects or leaves in it
_NUM_SAMPLES = 2000
_TRIMMED = 0.2  # share of the pairs that the mean leaves out at each end


def add_options(parser: Any) -> None:
    parser.add_argument("--runners", type=int, default=64, help="(default: 64)")


def report(options: argparse.Namespace) -> Iterator[str]:
    yield from asyncio.run(measure(options.runners, options.turns or 300, options.seconds or 1.0))


async def measure(num_runners: int, turns: int, turn_s: float) -> list[str]:
    from rlzmq.roles.broker_role import BrokerRole
    from tests.driver.broker_peers import FakeDriver, FakeLearner, FakePeer, FakeRunner
    from tests.telemetry.dashboards import Served

    broker = BrokerRole("run", {"peer_timeout_s": 60.0})
    addresses = await broker.start()
    runners = [FakeRunner(f"runner-{index}", addresses) for index in range(num_runners)]
    learner = FakeLearner(addresses)
    learner.on_trained = lambda update_id: (
        learner.trained.clear()
    )  # of no use here, and slower with every update
    await asyncio.sleep(_SETTLE_S)
    driver = FakeDriver(addresses, _ENOUGH_UPDATES, 10 * num_runners, staleness=1, max_policy_lag=1)
    peers: list[FakePeer] = [*runners, learner, driver]
    with tempfile.TemporaryDirectory() as place:
        served = await asyncio.to_thread(Served, Path(place), addresses["data"])
        try:
            await asyncio.to_thread(served.enter)
            await asyncio.sleep(2 * _SETTLE_S)
            gc.disable()  # `compare` collects between two turns
            lines = await compare(turns, turn_s, broker, driver, served)
        finally:
            gc.enable()
            served.process.terminate()
            served.process.communicate()
    for peer in peers:
        await peer.close()
    await broker.stop()
    return [f"{num_runners} runners, {turns} pairs of turns of {turn_s:g} s, {os.cpu_count()} cores", *lines]


class Turn(NamedTuple):
    """What happened in one turn, per second, except `cost_s`.

    Attributes:
        rate: Messages that the broker handles.
        cost_s: Processor time per message of broker, runners, learner and driver, in seconds.
        page_s: Processor time of the dashboard's process, in seconds.
        others_s: Processor time of all other processes of the machine, in seconds.
    """

    rate: float
    cost_s: float
    page_s: float
    others_s: float


async def compare(
    turns: int, turn_s: float, broker: BrokerRole, driver: FakeDriver, served: Served
) -> list[str]:
    import psutil

    pipe = asyncio.subprocess.PIPE
    viewer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _VIEWER, str(served.port), served.cookie, stdin=pipe
    )
    assert viewer.stdin is not None
    processes = [psutil.Process(served.process.pid), psutil.Process(viewer.pid)]
    found: dict[bool, list[Turn]] = {False: [], True: []}
    num_updates = 0
    try:
        for number in range(2 * turns):
            is_open = bool((number + 1) // 2 % 2)  # off on, on off, …
            if is_open != bool(number // 2 % 2):
                viewer.stdin.write(b"open\n" if is_open else b"close\n")
            gc.collect()
            await asyncio.sleep(_BETWEEN_S)
            driver.reports.clear()
            before, num_messages = _processor_times(psutil, processes), broker.num_messages
            await asyncio.sleep(turn_s)
            num_messages = broker.num_messages - num_messages
            num_updates += len(driver.reports)
            wall_s, own_s, page_s, viewer_s, all_s = (
                b - a for a, b in zip(before, _processor_times(psutil, processes), strict=True)
            )
            others_s = all_s - own_s - page_s - viewer_s
            turn = Turn(num_messages / wall_s, own_s / num_messages, page_s / wall_s, others_s / wall_s)
            found[is_open].append(turn)
    finally:
        viewer.kill()
        await viewer.wait()
    begin = time.process_time()
    for _ in range(100):
        await broker.status()
    status_s = (time.process_time() - begin) / 100
    pairs = list(zip(found[True], found[False], strict=True))
    others = [open_.others_s - shut.others_s for open_, shut in pairs]
    slower = interval([math.log(open_.rate / shut.rate) for open_, shut in pairs], others)
    dearer = interval([math.log(open_.cost_s / shut.cost_s) for open_, shut in pairs], others)
    means = {is_open: Turn(*np.mean(made, axis=0)) for is_open, made in found.items()}
    total = (status_s + means[True].page_s) / (os.cpu_count() or 1)
    verdict = (
        "yes" if slower[1] > -0.01 else "no" if slower[2] < -0.01 else "open: more turns, or an idler machine"
    )
    return [
        f"messages per second ({means[False].rate:.0f}, {num_updates / (2 * turns * turn_s):.0f} updates) "
        f"with the page open: {_text(*slower)}",
        f"a cost below 1 % of throughput: {verdict}",
        f"processor time per message ({means[False].cost_s * 1e6:.0f} µs) with the page open: {_text(*dearer)}",
        f"a status, asked for once a second: {status_s * 1e3:.2f} ms of the broker, {100 * status_s:.3f} % of its core",
        f"the dashboard's process: {100 * means[False].page_s:.1f} % of a core, "
        f"with the page open {100 * means[True].page_s:.1f} %",
        f"broker and dashboard together, of this machine's cores: {100 * total:.2f} %",
        f"other processes meanwhile: {means[False].others_s:.2f} cores",
    ]


def _processor_times(psutil: Any, processes: list[Any]) -> tuple[float, ...]:
    """Return the wall clock, and the processor time of this process, of these, and of the whole machine, in seconds."""
    machine = psutil.cpu_times()
    idle_s = machine.idle + machine.iowait + machine.guest + machine.guest_nice  # guests are part of user
    taken = (sum(process.cpu_times()[:2]) for process in processes)
    return time.monotonic(), time.process_time(), *taken, sum(machine) - idle_s


def interval(changes: list[float], others: list[float]) -> tuple[float, float, float]:
    """Return the change that remains when other processes take the same, and its 95 % interval (bootstrap of pairs).

    Args:
        changes: Logarithm of the ratio of each pair of turns.
        others: Difference of the processor time of other processes in each pair.
    """
    pairs = np.stack([changes, others], axis=-1)
    generator = np.random.default_rng(0)
    made = sorted(_adjusted(generator.choice(pairs, len(pairs))) for _ in range(_NUM_SAMPLES))
    return _adjusted(pairs), made[int(0.025 * _NUM_SAMPLES)], made[int(0.975 * _NUM_SAMPLES)]


def _adjusted(pairs: Any) -> float:
    """Return the trimmed mean of the changes minus their linear dependence on the other processes."""
    changes, others = pairs.T
    around = others - others.mean()
    slope = around @ changes / max(around @ around, 1e-9)
    rest = np.sort(changes - slope * others)
    left_out = int(_TRIMMED * len(rest))
    return math.expm1(rest[left_out : len(rest) - left_out].mean())


def _text(change: float, low: float, high: float) -> str:
    return f"{100 * change:+.2f} % (95 % interval {100 * low:+.2f} to {100 * high:+.2f} %)"
