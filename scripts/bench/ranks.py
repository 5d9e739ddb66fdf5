"""PPO with several learner ranks against one, equally many env steps for each rank.

"updates": updates alone, one torch thread and one process for each rank: "default" has two MLPs of 2×256 and
minibatches of 128, "small" 2×64 and 64, "image" the CNN of Mnih et al. (2015) on frames (84, 84, 4) and 64. "gloo":
the same without shared memory; "apart": both ranks at the same time without any exchange, which is what the cores
give. "two hosts": four ranks on one machine, of which two each believe to be on a host of their own; "gloo": gradients
are not summed in shared memory first. "runs": whole runs with two runner processes ("default": 15 epochs over 2,000
steps per rank, 2 × 8 environments; "small": 6 over 1,024, 2 × 16; "image": 2 over 512, 2 × 8).
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from scripts.bench._core import Comparison, Side, Turn, timed
from scripts.bench._envs import Frames

GOALS = {"default": "≥ 1.7", "small": "≥ 1.2", "image": "≥ 1.7"}
# model_config, steps per rank, minibatch, epochs, envs per runner
RUNS: dict[str, tuple[dict[str, Any], int, int, int, int]] = {
    "default": ({"fcnet_hiddens": [256, 256]}, 2000, 128, 15, 8),
    "small": ({"fcnet_hiddens": [64, 64]}, 1024, 64, 6, 16),
    "image": ({"fcnet_hiddens": [512], "vf_share_layers": True}, 512, 64, 2, 8),
}


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for net, goal in GOALS.items():
        one = Side(runs, {"net": net, "num_ranks": 1})
        sides = {f"{num} ranks": Side(runs, {"net": net, "num_ranks": num}) for num in (2, 4)}
        pairs = tuple((name, "1 rank") for name in sides)
        yield Comparison(f"runs, {net}", {"1 rank": one, **sides}, pairs, goal=goal, turn_s=4.0)
    for net in GOALS:
        one = Side(updates, {"net": net, "num_ranks": 1})
        sides = {
            "2 ranks" + ("" if exchange == "shared" else f", {exchange}"): Side(
                updates, {"net": net, "num_ranks": 2, "exchange": exchange}
            )
            for exchange in ("shared", "gloo", "apart")
        }
        pairs = tuple((name, "1 rank") for name in sides)
        yield Comparison(f"updates, {net}", {"1 rank": one, **sides}, pairs, unit="rows/s", turn_s=1.0)
    for net in GOALS:
        sides = {
            name: Side(updates, {"net": net, "num_ranks": 4, "exchange": exchange})
            for name, exchange in (("shared", "two hosts"), ("gloo", "gloo"))
        }
        yield Comparison(f"updates on two hosts, {net}", sides, unit="rows/s", turn_s=1.0)


def runs(net: str, num_ranks: int) -> Turn:
    from rlzmq import PPOConfig
    from scripts.bench.ppo import trained

    model_config, num_steps, minibatch_size, num_epochs, num_envs = RUNS[net]
    config = PPOConfig().environment(Frames if net == "image" else "CartPole-v1").debugging(seed=0)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=num_envs).learners(
        num_learners=num_ranks, torch_num_threads=1
    )
    config.rl_module(model_config=model_config).reporting(min_time_s_per_iteration=0)
    config.training(
        train_batch_size_per_learner=num_steps, minibatch_size=minibatch_size, num_epochs=num_epochs
    )
    return trained(config.build_algo())


def updates(net: str, num_ranks: int, exchange: str = "shared") -> Turn:
    from scripts.bench._updates import RANK_CASES

    context = multiprocessing.get_context("spawn")
    directory = tempfile.mkdtemp(dir=".")
    pipes = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, num_ranks, net, exchange, directory)
        context.Process(target=run_rank, args=arguments, daemon=True).start()
        pipes.append(ours)

    def update() -> int:
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
        return num_ranks * RANK_CASES[net].num_rows * RANK_CASES[net].num_epochs

    update()
    return timed(update)


def run_rank(pipe: Connection, rank: int, num_ranks: int, net: str, exchange: str, directory: str) -> None:
    """Make an update at each message, and answer when it is done."""
    import torch.distributed as dist

    from rlzmq.core.process import loopback_interface
    from rlzmq.learners import distributed
    from scripts.bench._updates import RANK_CASES, learner_of, make_episodes

    batch = make_episodes(RANK_CASES[net])
    learner = learner_of(batch, RANK_CASES[net])
    if num_ranks > 1 and exchange != "apart":
        if exchange == "gloo":
            distributed.RankGroup.share_rows = lambda *_: None  # type: ignore[method-assign]
        if exchange == "two hosts":
            distributed.process_space = lambda: f"host {2 * rank // num_ranks}"
        learner.ranks.join(
            rank=rank,
            world_size=num_ranks,
            store=dist.FileStore(f"{directory}/store", num_ranks),
            generation=1,
            interface=loopback_interface(),
        )
        learner.ranks.adopt_newest_state()
    while True:
        pipe.recv()
        learner.update(episodes=batch)
        pipe.send(None)
