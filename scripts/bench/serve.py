"""How much of a policy's in-process throughput a policy server gives to 64 clients over the wire.

    python scripts/bench/serve.py

In process is ``Policy.compute_actions`` on as many observations as all clients send at once. Both are measured in
turns, with the server and the clients on this machine; a client asks again as soon as it has its answer. The ratio is
what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import zmq

from rlzmq import AsyncPolicyClient, Policy, PPOConfig, register_env
from rlzmq.actors.event_loop import new_event_loop
from rlzmq.deploy.policy_messages import Act, encode_message
from rlzmq.net.join_file import JoinFile

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


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    options.add_argument("--turns", type=int, default=3, help="of measurements, whose medians are compared")
    options.add_argument("--listen", default="ipc", help="ipc, or tcp://127.0.0.1:0 with keys")
    options.add_argument(
        "--policy-client", action="store_true", help="clients are PolicyClients of one process"
    )
    options.add_argument("--only", default="", help="part of a workload's name")
    args = options.parse_args()
    print(f"{'':<32}{'in process':>14}{'over the wire':>16}{'ratio':>8}   observations/s")
    for name, workload in WORKLOADS.items():
        if args.only in name:
            ours, theirs = measured(*workload, args)
            print(f"{name:<32}{ours:>14,.0f}{theirs:>16,.0f}{theirs / ours:>8.2f}", flush=True)


def measured(space: Any, model: dict[str, Any], num_rows: int, args: Any) -> tuple[float, float]:
    """Medians of observations per second: in process, over the wire."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "000001"
        register_env("random", lambda config: RandomEnv(space))
        with PPOConfig().environment("random").rl_module(model_config=model).build() as algo:
            algo.save_to_path(path)
        policy = Policy.load(path)
        batch = np.stack([space.sample() for _ in range(args.clients * num_rows)])
        command = f"-m rlzmq serve {path} --http none --listen {args.listen} --reload-interval 0"
        command += f" --max-batch-size {args.clients * num_rows}"
        server = subprocess.Popen(
            [sys.executable, *command.split()], cwd=directory, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            while not (line := server.stdout.readline()).startswith("wire"):
                assert line, "the server ended"
            in_process, over_wire = [], []
            for _ in range(args.turns):
                in_process.append(in_process_rate(policy, batch, args.seconds))
                over_wire.append(wire_rate(Path(directory) / "serve.toml", batch, num_rows, args))
        finally:
            server.terminate()
            server.wait()
        return statistics.median(in_process), statistics.median(over_wire)


class RandomEnv(gym.Env[Any, Any]):
    """Random observations; it is there for its spaces."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, True, {}


def in_process_rate(policy: Policy, batch: Any, seconds: float) -> float:
    policy.compute_actions(batch)
    begun, num_calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < seconds:
        policy.compute_actions(batch)
        num_calls += 1
    return num_calls * len(batch) / spent


def wire_rate(join_file: Path, batch: Any, num_rows: int, args: Any) -> float:
    """Observations per second of all clients, which are in one process of their own."""
    requests = [batch[i * num_rows : (i + 1) * num_rows] for i in range(args.clients)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rate: float = pool.apply(
            play if args.policy_client else play_raw, (join_file, requests, args.seconds)
        )
    return rate


def play(join_file: Path, requests: list[Any], seconds: float) -> float:
    """Observations per second of PolicyClients on one event loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_play(join_file, requests, seconds))


def play_raw(join_file: Path, requests: list[Any], seconds: float) -> float:
    """Observations per second of clients that cost little: requests are encoded before, answers are not decoded."""
    join = JoinFile.read(join_file)
    context, poller, messages = zmq.Context(), zmq.Poller(), {}
    for observations in requests:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        if (curve := join.curve()) is not None:
            curve.apply(socket)
        socket.connect(join.addresses["policy"])
        poller.register(socket, zmq.POLLIN)
        messages[socket] = (
            encode_message(Act(1, "", "", False, False, False), [observations]),
            len(observations),
        )
    for socket, (frames, _) in messages.items():
        socket.send_multipart(frames)
    num_observations = 0
    middle = time.perf_counter() + 0.5
    end = middle + seconds
    while (now := time.perf_counter()) < end:
        for socket, _ in poller.poll():
            answer = socket.recv_multipart(copy=False)
            assert answer[0].bytes[1] == ACTIONS, "the server answered with an error"
            frames, num_rows = messages[socket]
            socket.send_multipart(frames)
            if now >= middle:
                num_observations += num_rows
    for socket in messages:
        socket.close()
    context.term()
    return num_observations / seconds


async def _play(join_file: Path, requests: list[Any], seconds: float) -> float:
    clients = [await AsyncPolicyClient(join_file).start() for _ in requests]
    num_observations = 0
    begun = time.perf_counter()
    middle, end = begun + 0.5, begun + 0.5 + seconds

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


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
