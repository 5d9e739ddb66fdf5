"""Sampling with runners of very different speed, against the sum of what each of them does alone.

Each runner's env sleeps: log-normal times, and every tenth step takes ten times as long. A batch is complete when
its last runner is: a perfect split gives 1.00, equal parts give (number of runners) x (the share of the slowest).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np


def add_options(parser: Any) -> None:
    parser.add_argument("--slowness", type=float, nargs="+", default=[1.0, 1.0, 10.0], help="of each runner")
    parser.add_argument(
        "--median-ms", type=float, default=1.0, help="of a step of a runner of slowness 1 (1)"
    )
    parser.add_argument("--batch", type=int, default=1000, help="env steps per update (1000)")
    parser.add_argument("--updates", type=int, default=10, help="measured, after two (10)")


def report(options: argparse.Namespace) -> Iterator[str]:
    terms = (options.batch, options.median_ms / 1e3, options.updates)
    known: dict[float, float] = {}
    for slowness in options.slowness:
        if slowness not in known:
            small = (max(100, int(options.batch / slowness)), *terms[1:])  # as long as the others
            known[slowness] = rate([slowness], *small)
            yield f"alone, slowness {slowness:g}: {known[slowness]:.0f} env steps/s"
    together = rate(options.slowness, *terms)
    alone = sum(known[slowness] for slowness in options.slowness)
    yield f"together: {together:.0f} env steps/s, {together / alone:.2f} of the sum of {alone:.0f}"


class SleepyEnv(gymnasium.Env[Any, Any]):
    """Episodes of 50 steps that take their time."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        slowness = config["slowness"][max(config.worker_index - 1, 0)]
        self._median_s = config["median_s"] * slowness
        self._times = np.random.default_rng(config.worker_index)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._step = 0
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        seconds = self._median_s * self._times.lognormal(0.0, 1.0)
        time.sleep(seconds * (10.0 if self._times.random() < 0.1 else 1.0))
        observation = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return observation, 1.0, False, self._step >= 50, {}


def rate(slowness: list[float], batch: int, median_s: float, num_updates: int) -> float:
    """Env steps per second of a run with one runner for each of `slowness`."""
    from rlzmq import PPOConfig

    config = (
        PPOConfig()
        .environment(SleepyEnv, env_config={"slowness": slowness, "median_s": median_s})
        .env_runners(num_env_runners=len(slowness), num_envs_per_env_runner=1, rollout_fragment_length=100)
        .training(train_batch_size_per_learner=batch, minibatch_size=batch, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
    )
    with config.build() as algo:
        for _ in range(2):  # until the runners' pace is known
            algo.train()
        start_s = time.perf_counter()
        for _ in range(num_updates):
            algo.train()
        return num_updates * batch / (time.perf_counter() - start_s)
