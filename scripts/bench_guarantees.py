"""What keeping two copies of every fragment, and encryption, cost, and what shared memory saves.

    python scripts/bench_guarantees.py
    python scripts/bench_guarantees.py --image      # (84,84,4) observations: 28 kB per env step
    python scripts/bench_guarantees.py --image --again --fragment-steps 64 --variants ipc frames    # delivery only

Env steps per second from a runner to a learner, and processor time. A broker, one runner, one learner and a driver,
each as in any run but for the learner, which trains nothing: whatever training costs would only make the shares
smaller. Five such runs take turns, the others rest:

    ipc         a local runner, as by default: large fragments stay in shared memory
    frames      the same, but all fragments pass through sockets
    one copy    as frames, but the runner forgets a fragment as soon as it is sent
    tcp         the runner comes by TCP without keys (a run refuses that; this script patches the refusal out)
    tcp+curve   the same with keys, as `rlzmq runner --join` does

Rates are medians over the turns; each cost is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

VARIANTS = ("ipc", "frames", "one copy", "tcp", "tcp+curve")
RUN_ID = "bench"
NUM_ENVS = 32


def make_config(image: bool) -> Any:
    """CartPole with its native vector env, or small static images with the default CNN."""
    from rlzmq import PPOConfig
    from scripts.bench._envs import Frames

    config = PPOConfig().debugging(seed=0)
    if image:
        return config.environment(Frames).env_runners(num_envs_per_env_runner=8)
    return (
        config.environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=NUM_ENVS, gym_env_vectorize_mode="vector_entry_point")
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"})
    )


def allow_open_tcp() -> None:
    """For the variant that measures what keys cost: nothing but this script does without them."""
    from rlzmq.net import socket

    socket.check_bind_address = socket.check_connect_address = lambda *args, **kwargs: None  # type: ignore[assignment]


# -- the processes ---------------------------------------------------------------------------------


async def serve_broker(variant: str) -> None:
    """Listens until stdin ends; prints its addresses and keys."""
    from rlzmq.driver.join_files import JoinKeys, listen_addresses
    from rlzmq.roles.broker.broker_role import BrokerRole

    keys = JoinKeys.generate()
    options: dict[str, Any] = {}
    if variant == "tcp":
        allow_open_tcp()
        options["addresses"] = listen_addresses("tcp://127.0.0.1:0")
    elif variant == "tcp+curve":
        options |= {"listen": listen_addresses("tcp://127.0.0.1:0"), "curve": keys.curve, "roles": keys.roles}
    broker = BrokerRole(RUN_ID, **options)
    addresses = await broker.start()
    prefix = "remote_" if variant == "tcp+curve" else ""
    outside = {name: addresses[prefix + name] for name in ("data", "weights")}
    curve = [keys.server.public, keys.clients["runner"].secret] if variant == "tcp+curve" else None
    print(json.dumps({"local": addresses["data"], "runner": outside, "curve": curve}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await broker.stop()


async def serve_runner(variant: str, image: bool, again: bool, addresses: dict[str, str], curve: Any) -> None:
    """Samples whatever leases come, until stdin ends; `again`: each length of them only once."""
    import torch

    from rlzmq.roles.runner.runner_link import RunnerLink
    from rlzmq.roles.runner.runner_role import EnvRunnerRole

    torch.set_num_threads(1)
    if variant == "tcp":
        allow_open_tcp()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as sampler:
        role = await loop.run_in_executor(sampler, EnvRunnerRole, make_config(image), 1)
        if again:
            role.take_fragment = functools.cache(role.take_fragment)
        link = RunnerLink(
            role,
            lambda job: loop.run_in_executor(sampler, job),
            run_id=RUN_ID,
            name="runner-1@bench",
            incarnation=1,
            data_address=addresses["data"],
            weights_address=addresses["weights"],
            curve=curve,
        )
        if variant in ("frames", "one copy"):
            link._segments = None
        if variant == "one copy":
            forget_what_is_sent(link.core)
        await link.start()
        await asyncio.to_thread(sys.stdin.read)
        await link.stop()
        await loop.run_in_executor(sampler, role.close)


def forget_what_is_sent(core: Any) -> None:
    """Let go of each fragment's memory once it is sent; its number is kept, for the broker counts on it."""
    on_sampled = core._on_sampled

    def once(event: Any, now: float) -> Any:
        instructions = on_sampled(event, now)
        for kept in core._kept.values():
            kept.frames = ()
        return instructions

    core._on_sampled = once


# -- one run ---------------------------------------------------------------------------------------


class NothingToLearn:
    """A learner of the runner's module that reads every batch once and leaves the weights as they are."""

    progress = 0
    left_out = ()
    was_trained = True

    def __init__(self, module: Any) -> None:
        self.module = module
        self.weights_seq_no = 0

    def update(self, *, episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for batch in episodes:
            for column in batch.columns.values():
                column.copy()
        self.weights_seq_no += 1
        return {"__all_modules__": {"num_env_steps_trained": 0}}


class Bench:
    """One variant's run; only the driver's `updates` move it."""

    def __init__(self, variant: str, driver: Any, pids: list[int], fragment_steps: int) -> None:
        self.variant = variant
        self._driver = driver
        self._pids = pids
        self._fragment_steps = fragment_steps

    async def turn(self, seconds: float, batch: int) -> tuple[float, float]:
        """Env steps per second that arrive, over whole batches, and microseconds of processor time per env step."""
        from rlzmq.wire.messages import OpenUpdate

        num_steps, start, busy_s = 0, time.perf_counter(), sum(map(processor_s, self._pids))
        while time.perf_counter() - start < seconds:
            update_id = self._driver.core.next_update
            self._driver.open_update(
                OpenUpdate(
                    update_id, batch, 1, weights_version=update_id, fragment_length=self._fragment_steps
                )
            )
            await self._driver.open_reports[update_id]
            del self._driver.open_reports[update_id]
            num_steps += batch
        rate = num_steps / (time.perf_counter() - start)
        return rate, 1e6 * (sum(map(processor_s, self._pids)) - busy_s) / max(num_steps, 1)


def processor_s(pid: int) -> float:
    """Processor time of a process's threads so far, in seconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextlib.asynccontextmanager
async def running(variant: str, options: argparse.Namespace, module: Any) -> AsyncIterator[Bench]:
    """Broker and runner as processes, learner and driver here."""
    from rlzmq.driver.driver_link import DriverLink
    from rlzmq.roles.learner.learner_link import LearnerLink

    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        broker = stack.enter_context(child(["--as-broker", variant]))
        assert broker.stdout is not None
        facts = json.loads(await asyncio.to_thread(broker.stdout.readline))
        if variant == "tcp":
            allow_open_tcp()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        learner = LearnerLink(
            NothingToLearn(module),
            lambda job: loop.run_in_executor(pool, job),
            run_id=RUN_ID,
            name="learner-0",
            data_address=facts["local"],
        )
        await learner.start()
        stack.push_async_callback(learner.stop)
        learner.form(generation=1, rank=0, num_ranks=1)
        driver = DriverLink(RUN_ID, facts["local"], next_update=0)
        await driver.start()
        stack.push_async_callback(driver.stop)
        arguments = ["--as-runner", variant, "--join", json.dumps([facts["runner"], facts["curve"]])]
        arguments += [f"--{name}" for name in ("image", "again") if getattr(options, name)]
        runner = stack.enter_context(child(arguments))
        yield Bench(variant, driver, [broker.pid, runner.pid, os.getpid()], options.fragment_steps)


@contextlib.contextmanager
def child(arguments: list[str]) -> Any:
    """This script in another role; it ends when its stdin does."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


async def compare(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Results of `Bench.turn` by variant."""
    from rlzmq.roles.runner.runner_role import make_env_runner

    env_runner = make_env_runner(make_config(options.image), 1)
    batch = options.fragment_steps * (2 * 8 if options.image else 6 * NUM_ENVS)
    turns: dict[str, list[tuple[float, float]]] = {variant: [] for variant in options.variants}
    async with contextlib.AsyncExitStack() as stack:
        benches = [
            await stack.enter_async_context(running(variant, options, env_runner.multi_rl_module))
            for variant in options.variants
        ]
        for bench in benches:
            await bench.turn(0.01, batch)  # the first batch waits for the runner to start
        for _ in range(options.turns):
            for bench in benches:
                turns[bench.variant].append(await bench.turn(options.turn_s, batch))
    env_runner.stop()
    return turns


def main() -> None:
    """Compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--image", action="store_true", help="observations of (84,84,4) in place of CartPole's"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all")
    parser.add_argument("--fragment-steps", type=int, default=100, help="vector steps of a fragment")
    parser.add_argument(
        "--again",
        action="store_true",
        help="the runner sends what it sampled for its first leases again and again",
    )
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-s", type=float, default=1.0)
    parser.add_argument("--as-broker", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--as-runner", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--join", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_broker:
        asyncio.run(serve_broker(options.as_broker))
    elif options.as_runner:
        asyncio.run(serve_runner(options.as_runner, options.image, options.again, *json.loads(options.join)))
    else:
        turns = asyncio.run(compare(options))
        for variant, values in turns.items():
            rate, busy_us = (median(column) for column in zip(*values, strict=True))
            print(f"{variant:10s} {rate:10,.0f} env steps/s {busy_us:8.1f} µs of processor time per env step")
        for what, with_it, without in (
            ("sockets in place of shared memory", "frames", "ipc"),
            ("two copies", "frames", "one copy"),
            ("CURVE", "tcp+curve", "tcp"),
            ("TCP and CURVE in place of ipc", "tcp+curve", "ipc"),
        ):
            if with_it not in turns or without not in turns:
                continue
            pairs = list(zip(turns[with_it], turns[without], strict=True))
            ratio, more_us = (
                median(a / b for (a, _), (b, _) in pairs),
                median(a - b for (_, a), (_, b) in pairs),
            )
            print(f"{what}: {100 * (1 - ratio):.1f} % of throughput, {more_us:.1f} µs per env step")


if __name__ == "__main__":
    main()
