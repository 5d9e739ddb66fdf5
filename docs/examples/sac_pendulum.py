# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Train SAC on Pendulum-v1."""

import argparse

from rlzmq import SACConfig


def main(iterations):
    config = (
        SACConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0)
        .training(
            actor_lr=2e-4,
            critic_lr=8e-4,
            alpha_lr=9e-4,
            n_step=(2, 5),
            num_steps_sampled_before_learning_starts=256,
        )
        .reporting(min_sample_timesteps_per_iteration=500)
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            print(
                result["env_runners"]["num_env_steps_sampled_lifetime"],
                result["env_runners"]["episode_return_mean"],
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=30)
    main(parser.parse_args().iterations)
