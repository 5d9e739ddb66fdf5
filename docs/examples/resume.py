# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""End a run and continue it from its checkpoint."""

import argparse
import tempfile

from rlzmq import Algorithm, PPOConfig


def main(iterations):
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=250,
            num_epochs=6,
            lr=3e-4,
        )
        .debugging(seed=0)
    )
    with tempfile.TemporaryDirectory() as directory:
        with config.build() as algo:
            for _ in range(iterations):
                print(
                    algo.training_iteration,
                    algo.train()["env_runners"]["episode_return_mean"],
                )
            path = algo.save_to_path(f"{directory}/checkpoint")
        with Algorithm.from_checkpoint(path) as resumed:
            for _ in range(iterations):
                print(
                    resumed.training_iteration,
                    resumed.train()["env_runners"]["episode_return_mean"],
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=5)
    main(parser.parse_args().iterations)
