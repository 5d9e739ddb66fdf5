"""Environments of the benchmarks, for rlzmq and for the peers."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np


class Frames(gym.Env[Any, Any]):
    """Images (84, 84, 4) of bytes out of eight random ones, and episodes of 100 steps; a step costs nothing."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(6)
    images = np.random.default_rng(0).integers(0, 255, (8, 84, 84, 4), np.uint8)

    def __init__(self, config: Any = None) -> None:
        self.num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.num_steps = 0
        return self.images[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        return self.images[self.num_steps % 8], 1.0, False, self.num_steps >= 100, {}


class NotingCartPole(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 that appends the return of each episode to the file that the variable ``BENCH_RETURNS`` names."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.total = 0.0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        if terminated or truncated:
            with open(os.environ["BENCH_RETURNS"], "a") as file:
                file.write(f"{self.total}\n")  # one write: whole lines from all processes
            self.total = 0.0
        return observation, reward, terminated, truncated, info


class FirstStepCartPole(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 that notes when it is stepped first after `first_at`, which all of a process share, was set to 0."""

    first_at = 0.0

    def __init__(self, config: Any = None) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if not FirstStepCartPole.first_at:
            FirstStepCartPole.first_at = time.perf_counter()
        return self.env.step(action)
