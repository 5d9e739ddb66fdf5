# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Make the task harder whenever it is solved: a corridor that grows."""

import argparse

import gymnasium as gym
import numpy as np

from rlzmq import PPOConfig, RLlibCallback


class Corridor(gym.Env):
    """Walk right to the end: -0.1 for each step, +1 for arriving."""

    def __init__(self, config=None):
        self.length = (config or {}).get("length", 3)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def observe(self):
        return np.array([min(1.0, self.position / 20)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.num_steps = 0
        return self.observe(), {}

    def step(self, action):
        self.position = max(0, self.position + (1 if action == 1 else -1))
        self.num_steps += 1
        arrived = self.position >= self.length
        return (
            self.observe(),
            1.0 if arrived else -0.1,
            arrived,
            self.num_steps >= 100,
            {},
        )


class Lengthen(RLlibCallback):
    """Makes the corridor longer when the mean episode needs at most 1.5 times the shortest way."""

    def __init__(self):
        self.length = 3

    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        result["corridor_length"] = self.length
        if (
            result["env_runners"]["episode_len_mean"] <= 1.5 * self.length
            and self.length < 20
        ):
            self.length += 1
            self.set_length(algorithm.env_runner_group)

    def on_env_runners_recreated(self, *, env_runner_group, **kwargs):
        self.set_length(
            env_runner_group
        )  # the envs of a runner that replaced another one start at 3

    def set_length(self, env_runner_group):
        length = self.length
        env_runner_group.foreach_env(
            lambda env: setattr(env.unwrapped, "length", length)
        )


def main(iterations):
    config = (
        PPOConfig()
        .environment(Corridor)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            train_batch_size_per_learner=1000,
            minibatch_size=250,
            num_epochs=5,
            lr=1e-3,
        )
        .callbacks(Lengthen)
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            print(
                result["corridor_length"],
                result["env_runners"]["episode_len_mean"],
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=30)
    main(parser.parse_args().iterations)
