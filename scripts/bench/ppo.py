"""PPO end to end against RLlib: its tuned settings for CartPole-v1, its defaults, and images.

Two runner processes and one torch thread in each process. RLlib's learner is in its driver, its default; rlzmq's is
in a process or in the driver. "tuned": RLlib's tuned settings for CartPole-v1, 2 × 16 environments, a shared net of
one layer of 32 linear units, 6 epochs of minibatches of 128 over 4,000 steps. "defaults": two MLPs of 2×256, 30
epochs of 128 over 4,000 steps, 2 × 8. "images": frames (84, 84, 4), a convolutional net 32-64-64 with a dense layer
of 512, 1 epoch of minibatches of 256 over 1,024 steps, 2 × 8; RLlib trains on floats, to which a wrapper of the
environment converts them there, as in its Atari examples (rlzmq's frames stay bytes until the network). "images, all
cores": the same, and the learners of both have as many torch threads as there are cores.
"""

from __future__ import annotations

import argparse
import atexit
import os
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from scripts.bench._core import Comparison, Side, Turn, timed
from scripts.bench._envs import Frames

ALL_CORES = "images, all cores"
GOALS = {"tuned": "≥ 6", "defaults": "≥ 3", "images": "≥ 3", ALL_CORES: "≥ 3"}
CONV = {
    "conv_filters": [[32, 8, 4], [64, 4, 2], [64, 3, 1]],
    "head_fcnet_hiddens": [512],
    "vf_share_layers": True,
}


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for name, goal in GOALS.items():
        sides = {
            "rlzmq": Side(rlzmq, {"name": name, "num_learners": 1}),
            "rlzmq, learner in the driver": Side(rlzmq, {"name": name, "num_learners": 0}),
            "RLlib": Side(rllib, {"name": name}, "rllib"),
        }
        pairs = (("rlzmq", "RLlib"), ("rlzmq, learner in the driver", "RLlib"))
        yield Comparison(name, sides, ratios=pairs, goal=goal, turn_s=6.0)


class FloatFrames(gym.ObservationWrapper[Any, Any, Any]):
    """Images as float32 in [-1, 1]."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(Frames())
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (84, 84, 4), np.float32)

    def observation(self, observation: Any) -> Any:
        return (observation.astype(np.float32) / 128.0) - 1.0


def configured(config: Any, name: str, env: Any) -> Any:
    """Set a PPOConfig of either library."""
    config.environment(env).debugging(seed=0).reporting(min_time_s_per_iteration=0)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=16 if name == "tuned" else 8)
    if name == "tuned":
        config.training(lr=0.0003, num_epochs=6, vf_loss_coeff=0.01)
        config.rl_module(
            model_config={"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True}
        )
    if name.startswith("images"):
        config.rl_module(model_config=CONV)
        config.training(train_batch_size_per_learner=1024, minibatch_size=256, num_epochs=1)
    return config


def rlzmq(name: str, num_learners: int = 1, env: Any = None) -> Turn:
    from rlzmq import PPOConfig

    config = configured(PPOConfig(), name, env or (Frames if name.startswith("images") else "CartPole-v1"))
    config.learners(num_learners=num_learners, torch_num_threads="auto" if name == ALL_CORES else 1)
    return trained(config.build_algo())


def rllib(name: str, env: Any = None) -> Turn:
    import ray
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig

    if name == ALL_CORES:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    env = env or (FloatFrames if name.startswith("images") else "CartPole-v1")
    return trained(configured(PPOConfig(), name, env).build_algo())


def trained(algo: Any, warm_up: int = 0) -> Turn:
    """Return the turn of an Algorithm of either library after an iteration, and more than `warm_up` env steps."""
    atexit.register(algo.stop)
    num_steps = 0

    def train() -> int:
        nonlocal num_steps
        before, num_steps = num_steps, algo.train()["env_runners"]["num_env_steps_sampled_lifetime"]
        return num_steps - before

    while num_steps <= warm_up:
        train()
    return timed(train)
