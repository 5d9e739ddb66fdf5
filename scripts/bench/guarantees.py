"""What keeping two copies of every fragment, and encryption, cost, and what shared memory saves.

Env steps per second from a runner to a learner. A broker, one runner, one learner and a driver, each as in any run
but for the learner, which reads each batch once and trains nothing: whatever training costs would only make the
shares smaller. "ipc": a local runner, as by default: large fragments stay in shared memory; "frames": the same, but
all fragments pass through sockets; "one copy": as frames, but the runner forgets a fragment as soon as it is sent;
"tcp": the runner comes by TCP without keys (a run refuses that; this case patches the refusal out); "tcp+curve":
the same with keys, as `rlzmq runner --join` does. CartPole with 32 environments, and images (84, 84, 4), 28 kB per
env step; "delivery": the runner sends what it sampled for its first leases again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.bench._core import Comparison, Side, Turn

RUN_ID = "bench"
NUM_ENVS = 32
VARIANTS = ("ipc", "frames", "one copy", "tcp", "tcp+curve")
RATIOS = (("frames", "ipc"), ("frames", "one copy"), ("tcp+curve", "tcp"), ("tcp+curve", "ipc"))


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for title, variants, settings in (
        ("CartPole", VARIANTS, {"is_image": False}),
        ("images", VARIANTS, {"is_image": True}),
        ("images, delivery", VARIANTS[:2], {"is_image": True, "is_repeated": True, "fragment_steps": 64}),
    ):
        sides = {variant: Side(run, {"variant": variant, **settings}) for variant in variants}
        pairs = tuple(pair for pair in RATIOS if set(pair) <= set(variants))
        yield Comparison(title, sides, pairs, turns=12, turn_s=1.0)


def make_config(is_image: bool) -> Any:
    """Return CartPole with its native vector env, or small static images with the default CNN."""
    from rlzmq import PPOConfig
    from scripts.bench._envs import Frames

    config = PPOConfig().debugging(seed=0)
    if is_image:
        return config.environment(Frames).env_runners(num_envs_per_env_runner=8)
    return (
        config.environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=NUM_ENVS, gym_env_vectorize_mode="vector_entry_point")
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"})
    )


def run(variant: str, is_image: bool, is_repeated: bool = False, fragment_steps: int = 100) -> Turn:
    """Start broker and runner as processes, learner and driver on a thread here; only turns move them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    driver = asyncio.run_coroutine_threadsafe(connect(variant, is_image, is_repeated), loop).result()
    batch = fragment_steps * (2 * 8 if is_image else 6 * NUM_ENVS)

    async def updates(seconds: float) -> float:
        from rlzmq.wire.messages import OpenUpdate

        num_steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            update_id = driver.core.next_update
            driver.open_update(
                OpenUpdate(update_id, batch, 1, weights_version=update_id, fragment_length=fragment_steps)
            )
            await driver.open_reports[update_id]
            del driver.open_reports[update_id]
            num_steps += batch
        return num_steps / elapsed

    def turn(seconds: float) -> float:
        return asyncio.run_coroutine_threadsafe(updates(seconds), loop).result()

    turn(0.0001)  # waits for the runner to start
    return turn


async def connect(variant: str, is_image: bool, is_repeated: bool) -> Any:
    """Return the driver of a new run."""
    from rlzmq.driver.driver_link import DriverLink
    from rlzmq.roles.learner_link import LearnerLink
    from rlzmq.roles.runner_role import make_env_runner

    loop = asyncio.get_running_loop()
    broker = child(serve_broker, variant)
    assert broker.stdout is not None
    facts = json.loads(await asyncio.to_thread(broker.stdout.readline))
    if variant == "tcp":
        allow_open_tcp()
    pool = ThreadPoolExecutor(1)
    learner = LearnerLink(
        NothingToLearn(make_env_runner(make_config(is_image), 1).multi_rl_module),
        lambda job: loop.run_in_executor(pool, job),
        run_id=RUN_ID,
        name="learner-0",
        data_address=facts["local"],
    )
    await learner.start()
    learner.enlist(generation=1, rank=0, num_ranks=1)
    driver = DriverLink(RUN_ID, facts["local"], next_update=0)
    await driver.start()
    child(serve_runner, variant, is_image, is_repeated, facts["runner"], facts["curve"])
    return driver


def child(function: Callable[..., Any], *arguments: Any) -> subprocess.Popen[str]:
    """Start a process that runs a function (or coroutine function) of a case until this process ends."""
    code = f"import asyncio, json, sys; from {function.__module__} import {function.__name__} as run\n"
    code += "result = run(*json.loads(sys.argv[1]))\nif result is not None: asyncio.run(result)"
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return process


# -- the processes ---------------------------------------------------------------------------------


def allow_open_tcp() -> None:
    """For the variant that measures what keys cost: nothing but this case does without them."""
    from rlzmq.net import socket

    socket.check_bind_address = socket.check_connect_address = lambda *args, **kwargs: None  # type: ignore[assignment]


async def serve_broker(variant: str) -> None:
    """Listens until stdin ends; prints its addresses and keys."""
    from rlzmq.driver.join_files import JoinKeys, listen_addresses
    from rlzmq.roles.broker_role import BrokerRole

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


async def serve_runner(
    variant: str, is_image: bool, is_repeated: bool, addresses: dict[str, str], curve: Any
) -> None:
    """Samples whatever leases come, until stdin ends; `is_repeated`: each length of them only once."""
    import torch

    from rlzmq.roles.runner_role import EnvRunnerRole, RunnerLink

    torch.set_num_threads(1)
    if variant == "tcp":
        allow_open_tcp()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as sampler:
        role = await loop.run_in_executor(sampler, EnvRunnerRole, make_config(is_image), 1)
        if is_repeated:
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
