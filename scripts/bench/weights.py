"""Milliseconds from the end of an optimizer step to a runner's first action with the new weights.

A broker, a learner, and 1 or 16 runners of one CartPole each, all processes of their own, in updates of one env step
of each runner, sampled with exactly the last update's weights. In between: the learner's copy of its weights, their
way through the broker, the driver's next update and its leases, the runner's copy, and the forward pass. Two dense
layers of 500 units (1 MB) or 2,236 (20 MB). "sockets": without shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.bench._core import Comparison, Side, Turn
from scripts.bench.guarantees import RUN_ID, NothingToLearn, child, serve_broker

UNITS = {"1 MB": 500, "20 MB": 2236}
NUM_STEPS = 1  # env step of each runner per update

Note = tuple[str, int, float]  # role, weights version, seconds


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for size, num_runners, which, limit in (
        ("1 MB", 1, "its first action", "5 ms"),
        ("20 MB", 16, "the median runner", "25 ms"),
        ("20 MB", 16, "the last runner", "25 ms"),
    ):
        settings = {"units": UNITS[size], "num_runners": num_runners, "is_last": which == "the last runner"}
        sides = {
            name: Side(first_actions, {**settings, "is_shared": name == "rlzmq"})
            for name in ("rlzmq", "sockets")
        }
        title = f"{size}, runners: {num_runners}, {which}, wanted: ≤ {limit}"
        yield Comparison(title, sides, unit="ms", is_rate=False, turns=7, turn_s=2.0)


def first_actions(units: int, num_runners: int, is_last: bool, is_shared: bool) -> Turn:
    """Start all processes; a turn makes updates, and returns the median over them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
    stepped: dict[int, float] = {}  # by version, also that of the turn before
    driver = asyncio.run_coroutine_threadsafe(connect(units, num_runners, is_shared, notes), loop).result()

    async def updates(seconds: float) -> int:
        """Make updates; return the version of the last weights that runners have used."""
        from rlzmq.wire.messages import OpenUpdate

        batch, start = NUM_STEPS * num_runners, time.perf_counter()
        while True:
            update_id: int = driver.core.next_update
            driver.open_update(
                OpenUpdate(update_id, batch, 1, weights_version=update_id, fragment_length=NUM_STEPS)
            )
            await driver.open_reports[update_id]
            del driver.open_reports[update_id]
            if time.perf_counter() - start >= seconds:
                return update_id

    def turn(seconds: float) -> float:
        last = asyncio.run_coroutine_threadsafe(updates(seconds), loop).result()
        acted: dict[int, list[float]] = {}
        while last + 1 not in stepped or not notes.empty():
            role, version, at = notes.get()
            if role == "learner":
                stepped[version] = at
            else:
                acted.setdefault(version, []).append(at)
        chosen = max if is_last else statistics.median
        times = [chosen(own) - stepped[version] for version, own in acted.items() if version in stepped]
        return 1000 * statistics.median(times) if times else 0.0

    turn(0.0)  # waits for the runners to start
    turn(0.5)
    return turn


async def connect(units: int, num_runners: int, is_shared: bool, notes: queue.SimpleQueue[Note]) -> Any:
    """Start the roles of a run; return its driver."""
    from rlzmq.driver.driver_link import DriverLink

    broker = child(serve_broker, "ipc")
    assert broker.stdout is not None
    facts = json.loads(await asyncio.to_thread(broker.stdout.readline))
    for noting in (
        child(serve_learner, units, is_shared, facts["local"]),
        child(serve_runners, units, num_runners, facts["runner"]),
    ):
        threading.Thread(target=collect, args=(noting, notes), daemon=True).start()
    driver = DriverLink(RUN_ID, facts["local"], next_update=0)
    await driver.start()
    return driver


def collect(process: subprocess.Popen[str], notes: queue.SimpleQueue[Note]) -> None:
    """Put what a process notes into a queue."""
    assert process.stdout is not None
    for line in process.stdout:
        role, version, at = line.split()
        notes.put((role, int(version), float(at)))


# -- the processes ---------------------------------------------------------------------------------


def note(role: str, version: int, at: float) -> None:
    os.write(
        sys.stdout.fileno(), f"{role} {version} {at}\n".encode()
    )  # one write: whole lines of all processes


def make_config(units: int) -> Any:
    from rlzmq import PPOConfig
    from scripts.bench._envs import FirstStepCartPole

    config = PPOConfig().environment(FirstStepCartPole).debugging(seed=0)
    return config.rl_module(model_config={"fcnet_hiddens": [units, units]})


class AddsAMillionth(NothingToLearn):
    """An optimizer step that changes all weights, and notes when it is done."""

    def update(self, *, episodes: Any, **kwargs: Any) -> dict[str, Any]:
        import torch

        with torch.no_grad():
            torch._foreach_add_(list(self.module["default_policy"].parameters()), 1e-6)
        result = super().update(episodes=episodes, **kwargs)
        note("learner", self.weights_seq_no, time.perf_counter())
        return result


async def serve_learner(units: int, is_shared: bool, address: str) -> None:
    """Trains until stdin ends."""
    import torch

    from rlzmq.roles.learner_link import LearnerLink
    from rlzmq.roles.runner_role import make_env_runner

    torch.set_num_threads(1)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        link = LearnerLink(
            AddsAMillionth(make_env_runner(make_config(units), 1).multi_rl_module),
            lambda job: loop.run_in_executor(pool, job),
            run_id=RUN_ID,
            name="learner-0",
            data_address=address,
        )
        if not is_shared:
            link._segments = None
        await link.start()
        link.enlist(generation=1, rank=0, num_ranks=1)
        await asyncio.to_thread(sys.stdin.read)
        await link.stop()


def serve_runners(units: int, num_runners: int, addresses: dict[str, str]) -> None:
    """Fork processes that sample until stdin ends."""
    import torch

    torch.set_num_threads(1)
    pids = []
    for number in range(1, num_runners + 1):
        pid = os.fork()
        if not pid:
            asyncio.run(serve_runner(units, number, addresses))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


async def serve_runner(units: int, number: int, addresses: dict[str, str]) -> None:
    from rlzmq.roles.runner_role import EnvRunnerRole, RunnerLink
    from scripts.bench._envs import FirstStepCartPole

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as sampler:
        role = await loop.run_in_executor(sampler, EnvRunnerRole, make_config(units), number)
        take_fragment = role.take_fragment

        def take_and_note(*arguments: Any) -> Any:
            FirstStepCartPole.first_at = 0.0
            batch = take_fragment(*arguments)
            if FirstStepCartPole.first_at:  # otherwise the only step was a reset
                note("runner", batch.meta["weights_version"], FirstStepCartPole.first_at)
            return batch

        role.take_fragment = take_and_note
        link = RunnerLink(
            role,
            lambda job: loop.run_in_executor(sampler, job),
            run_id=RUN_ID,
            name=f"runner-{number}@bench",
            incarnation=1,
            data_address=addresses["data"],
            weights_address=addresses["weights"],
        )
        await link.start()
        await asyncio.to_thread(sys.stdin.read)
        await link.stop()
        await loop.run_in_executor(sampler, role.close)
