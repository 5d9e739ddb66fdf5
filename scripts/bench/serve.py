"""How much of a policy's in-process throughput a policy server gives to 64 clients over HTTP.

In process is ``Policy.compute_actions`` on as many observations as all clients send at once. Over HTTP, server and
clients share this machine; a client asks again as soon as it has its answer. Clients cost little: requests are
encoded before, answers are not decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np

from scripts.bench._core import Comparison, Side, Turn, timed

NUM_CLIENTS = 64
FRAMES = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
VECTOR = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
NATURE = {"conv_filters": [[32, 8, 4], [64, 4, 2], [64, 3, 1]], "fcnet_hiddens": [512]}
MLP = {"fcnet_hiddens": [256, 256]}
# Name: (observation space, model, observations per request).
WORKLOADS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "frames 84x84x4, 1 per request": (FRAMES, NATURE, 1),
    "vectors, 64 per request": (VECTOR, MLP, 64),
    "vectors, 1 per request": (VECTOR, MLP, 1),
}


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for name in WORKLOADS:
        sides = {
            "over HTTP": Side(over_http, {"workload": name}),
            "in process": Side(in_process, {"workload": name}),
        }
        yield Comparison(name, sides, unit="observations/s", turns=3)


class RandomEnv(gym.Env[Any, Any]):
    """Random observations; it is there for its spaces."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, True, {}


def prepared(workload: str) -> tuple[Path, Any]:
    """Return a checkpoint in this process's folder, and an observation for each row that the clients send at once."""
    from rlzmq import PPOConfig, register_env

    space, model, num_rows = WORKLOADS[workload]
    path = Path.cwd() / "000001"
    register_env("random", lambda config: RandomEnv(space))
    with PPOConfig().environment("random").rl_module(model_config=model).build() as algo:
        algo.save_to_path(path)
    return path, np.stack([space.sample() for _ in range(NUM_CLIENTS * num_rows)])


def in_process(workload: str) -> Turn:
    from rlzmq import Policy

    path, batch = prepared(workload)
    policy = Policy.load(path)

    def act() -> int:
        policy.compute_actions(batch)
        return len(batch)

    return timed(act)


def over_http(workload: str) -> Turn:
    path, batch = prepared(workload)
    command = f"-m rlzmq serve {path} --port 0 --reload-interval 0 --max-batch-size {len(batch)}"
    server = subprocess.Popen([sys.executable, *command.split()], stdout=subprocess.PIPE, text=True)
    atexit.register(server.wait)
    atexit.register(server.terminate)
    assert server.stdout is not None
    said: dict[str, str] = {}
    while "token" not in said:
        line = server.stdout.readline()
        assert line, "the server ended"
        name, _, value = line.strip().partition(" ")
        said[name] = value.strip()
    address, token = urlsplit(said["http"]), Path(said["token"]).read_text().strip()
    requests = []
    for observations in np.split(batch, NUM_CLIENTS):
        body = json.dumps({"observations": observations.tolist()})
        head = f"POST /v1/act HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        requests.append((f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode(), len(observations)))
    return lambda seconds: asyncio.run(
        play((str(address.hostname), int(address.port or 0)), requests, seconds)
    )


async def play(address: tuple[str, int], requests: list[tuple[bytes, int]], seconds: float) -> float:
    """Return the observations answered per second, after half a second."""
    num_observations = 0
    middle = time.perf_counter() + 0.5
    end = middle + seconds

    async def ask(request: bytes, num_rows: int) -> None:
        nonlocal num_observations
        reader, writer = await asyncio.open_connection(*address)
        while (now := time.perf_counter()) < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            num_observations += num_rows * (now >= middle)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(ask(*request))
    return num_observations / seconds
