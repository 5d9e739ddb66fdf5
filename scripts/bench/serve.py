"""How much of a policy's in-process throughput a policy server gives to 64 clients over the wire.

In process is ``Policy.compute_actions`` on as many observations as all clients send at once. Over the wire, server
and clients share this machine; a client asks again as soon as it has its answer. Clients cost little: requests are
encoded before, answers are not decoded. With ``--policy-client`` they are PolicyClients on one event loop.
"""

from __future__ import annotations

import argparse
import atexit
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from scripts.bench._core import Comparison, Side, Turn, timed

NUM_CLIENTS = 64
ACTIONS = 147  # kind of the answers
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


def add_options(parser: Any) -> None:
    parser.add_argument("--listen", default="ipc", help="ipc, or tcp://127.0.0.1:0 with keys")
    parser.add_argument("--policy-client", action="store_true", help="clients are PolicyClients")


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for name in WORKLOADS:
        wire = {"workload": name, "listen": options.listen, "is_raw": not options.policy_client}
        sides = {
            "over the wire": Side(over_the_wire, wire),
            "in process": Side(in_process, {"workload": name}),
        }
        yield Comparison(name, sides, unit="observations/s", turns=3, goal="≥ 0.9")


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


def over_the_wire(workload: str, listen: str, is_raw: bool) -> Turn:
    path, batch = prepared(workload)
    command = f"-m rlzmq serve {path} --http none --listen {listen} --reload-interval 0 --max-batch-size {len(batch)}"
    server = subprocess.Popen([sys.executable, *command.split()], stdout=subprocess.PIPE, text=True)
    atexit.register(server.wait)
    atexit.register(server.terminate)
    assert server.stdout is not None
    while not (line := server.stdout.readline()).startswith("wire"):
        assert line, "the server ended"
    requests = np.split(batch, NUM_CLIENTS)
    play = play_raw if is_raw else play_policy_clients
    join_file = Path(line.split()[1])
    return lambda seconds: play(join_file, requests, seconds)


def play_policy_clients(join_file: Path, requests: list[Any], seconds: float) -> float:
    import asyncio

    from rlzmq.actors.event_loop import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_play(join_file, requests, seconds))


def play_raw(join_file: Path, requests: list[Any], seconds: float) -> float:
    import zmq

    from rlzmq.deploy.policy_messages import Act, encode_message
    from rlzmq.net.join_file import JoinFile

    join = JoinFile.read(join_file)
    context, epoll = zmq.Context(), select.epoll()
    clients = {}
    for observations in requests:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        if (curve := join.curve()) is not None:
            curve.apply(socket)
        socket.connect(join.addresses["policy"])
        frames = encode_message(1, Act("", "", False, False, False), [observations])
        # Waiting for a descriptor of the system costs less than a zmq poll of all clients for each answer.
        epoll.register(socket.fileno(), select.EPOLLIN | select.EPOLLET)
        clients[socket.fileno()] = socket, [bytes(frame) for frame in frames], len(observations)
    num_observations = 0
    middle = time.perf_counter() + 0.5
    end = middle + seconds
    for socket, frames, _ in clients.values():
        socket.send_multipart(frames)
    ready, events, readable = list(clients), int(zmq.EVENTS), int(zmq.POLLIN)
    while (now := time.perf_counter()) < end:
        for descriptor in ready:
            socket, frames, num_rows = clients[descriptor]
            # The descriptor reports changes only, and any call may have consumed one.
            while socket.get(events) & readable:
                answer = socket.recv_multipart()
                assert answer[0][1] == ACTIONS, "the server answered with an error"
                socket.send_multipart(frames)
                num_observations += num_rows * (now >= middle)
        ready = [descriptor for descriptor, _ in epoll.poll(1.0)]
    for socket, _, _ in clients.values():
        socket.close()
    epoll.close()
    context.term()
    return num_observations / seconds


async def _play(join_file: Path, requests: list[Any], seconds: float) -> float:
    import asyncio

    from rlzmq import AsyncPolicyClient

    clients = [await AsyncPolicyClient(join_file).start() for _ in requests]
    num_observations = 0
    middle = time.perf_counter() + 0.5
    end = middle + seconds

    async def ask(client: AsyncPolicyClient, observations: Any) -> None:
        nonlocal num_observations
        while (now := time.perf_counter()) < end:
            await client.compute_actions(observations)
            if now >= middle:
                num_observations += len(observations)

    async with asyncio.TaskGroup() as group:
        for client, observations in zip(clients, requests, strict=True):
            group.create_task(ask(client, observations))
    for client in clients:
        await client.stop()
    return num_observations / seconds
