"""Replay buffers alone: batches of 256 drawn from 10⁶ transitions, and the memory of one transition.

"batches of 256": vectors of four floats, 1,000 episodes of 1,000 steps; uniform against prioritized draws.
"bytes": `num_bytes` per env step of the same buffer, and of one with 10⁴ frames (84, 84, 1) of bytes, which the learner
stacks when it reads them: every observation is stored once, with next observations and stacks as views.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from scripts.bench._core import Comparison, Side, Turn, timed

EPISODE_STEPS = 1000


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    sides = {
        "uniform": Side(batches, {"name": "EpisodeReplayBuffer"}),
        "prioritized": Side(batches, {"name": "PrioritizedEpisodeReplayBuffer"}),
    }
    yield Comparison("batches of 256", sides, unit="batches/s", turn_s=1.0)
    sides = {
        "frames (84, 84, 1)": Side(num_bytes, {"shape": (84, 84, 1), "num_episodes": 10}),
        "vectors of 4": Side(num_bytes, {"shape": (4,), "num_episodes": 1000}),
    }
    yield Comparison("bytes", sides, unit="bytes per transition", is_rate=False, turns=1)


def filled(name: str, shape: tuple[int, ...], num_episodes: int) -> Any:
    import gymnasium as gym
    import numpy as np

    import rlzmq

    dtype: Any = np.float32 if len(shape) == 1 else np.uint8
    space = gym.spaces.Box(0, 255, shape, dtype)
    buffer = getattr(rlzmq, name)(capacity=num_episodes * EPISODE_STEPS)
    for index in range(num_episodes):
        episode = rlzmq.SingleAgentEpisode(
            id_=str(index),
            observations=np.zeros((EPISODE_STEPS + 1, *shape), dtype),
            actions=np.zeros(EPISODE_STEPS, np.int64),
            rewards=np.zeros(EPISODE_STEPS, np.float32),
            terminated=True,
            observation_space=space,
            action_space=gym.spaces.Discrete(2),
            len_lookback_buffer=0,
        )
        buffer.add(episode)
    return buffer


def batches(name: str) -> Turn:
    buffer = filled(name, (4,), 1000)

    def draw() -> int:
        buffer.sample(256)
        return 1

    return timed(draw)


def num_bytes(shape: tuple[int, ...], num_episodes: int) -> Turn:
    buffer = filled("EpisodeReplayBuffer", tuple(shape), num_episodes)
    return lambda seconds: float(buffer.num_bytes / len(buffer))
