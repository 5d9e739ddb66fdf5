"""Whole PPO runs with one learner rank and with two, turn about: env steps per second.

    python scripts/bench_ranks.py [default small image] [--seconds 3] [--rounds 3] [--autogroup -15]

Two runner processes, equally many env steps for each rank. "default": 2×256, 2,000 steps, 15 epochs of 128; "small":
2×64, 1,024 steps, 6 epochs of 64; "image": the CNN of Mnih et al. (2015) on frames (84, 84, 4), 512 steps, 2 epochs of
64. "DDP": DistributedDataParallel with gloo in place of shared memory. All runs exist at the same time, and wait while
another one is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
import psutil  # type: ignore[import-untyped]

from rlzmq.algorithms.ppo import PPOConfig

# model_config, steps per rank, minibatch, epochs, envs per runner
CASES: dict[str, tuple[dict[str, Any], int, int, int, int]] = {
    "default": ({"fcnet_hiddens": [256, 256]}, 2000, 128, 15, 8),
    "small": ({"fcnet_hiddens": [64, 64]}, 1024, 64, 6, 16),
    "image": ({"fcnet_hiddens": [512], "vf_share_layers": True}, 512, 64, 2, 8),
}
# name: ranks, arguments of DistributedDataParallel (any ask for it; this is its default)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "2 ranks, DDP": (2, {"bucket_cap_mb": 25}),
}


class Frames(gym.Env[Any, Any]):
    """Random images, and episodes of 100 steps; a step costs nothing."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self._frames = np.random.default_rng(0).integers(0, 255, (8, 84, 84, 4), np.uint8)
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._num_steps = 0
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        return self._frames[self._num_steps % 8], 1.0, False, self._num_steps >= 100, {}


def build(case: str, num_ranks: int, ddp_kwargs: dict[str, Any]) -> Any:
    """Return the run after its first iteration."""
    model_config, num_steps, minibatch_size, num_epochs, num_envs = CASES[case]
    config = (
        PPOConfig()
        .environment(Frames if case == "image" else "CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=num_envs)
        .learners(num_learners=num_ranks)
        .framework(torch_ddp_kwargs=ddp_kwargs)
        .rl_module(model_config=model_config)
        .training(
            train_batch_size_per_learner=num_steps, minibatch_size=minibatch_size, num_epochs=num_epochs
        )
        .reporting(min_time_s_per_iteration=0)
        .debugging(seed=0)
    )
    algo = config.build_algo()
    algo.train()
    return algo


def rate(algo: Any, seconds: float) -> float:
    before = algo.train()["num_env_steps_sampled_lifetime"]
    began_at = time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_at) < seconds:
        result = algo.train()
    return float(result["num_env_steps_sampled_lifetime"] - before) / elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--autogroup", type=int, help="nice value of the scheduler's groups (Linux)")
    arguments = parser.parse_args()
    for case in arguments.cases:
        algos = {name: build(case, *run) for name, run in RUNS.items()}
        if arguments.autogroup is not None:
            for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
                with open(f"/proc/{process.pid}/autogroup", "w") as file:
                    file.write(str(arguments.autogroup))
        rates: dict[str, list[float]] = {name: [] for name in algos}
        for _ in range(arguments.rounds):
            for name, algo in algos.items():
                rates[name].append(rate(algo, arguments.seconds))
        for algo in algos.values():
            algo.stop()
        for name, values in rates.items():
            ratios = [value / one for value, one in zip(values, rates["1 rank"], strict=True)]
            print(
                f"{case:8} {name:13} {statistics.median(values):9,.0f} env steps/s: {statistics.median(ratios):.2f} × "
                f"one rank ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
