# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Train PPO in an environment of your own."""

import argparse

import gymnasium as gym
import numpy as np

from rlzmq import PPOConfig


class Corridor(gym.Env):
    """Walk right to the end: -0.1 for each step, +1 for arriving."""

    def __init__(self, config=None):
        self.length = (config or {}).get("length", 10)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def observe(self):
        return np.array([self.position / self.length], np.float32)

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


def main(iterations):
    config = (
        PPOConfig()
        .environment(Corridor, env_config={"length": 10})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            train_batch_size_per_learner=1000,
            minibatch_size=250,
            num_epochs=5,
            lr=1e-3,
        )
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            runners = algo.train()["env_runners"]
            print(
                f"length {runners['episode_len_mean']:.1f}  return {runners['episode_return_mean']:.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
