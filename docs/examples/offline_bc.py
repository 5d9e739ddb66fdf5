# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Record the episodes of a PPO run, and clone them with BC."""

import argparse
import tempfile

from rlzmq import BCConfig, PPOConfig


def main(iterations):
    with tempfile.TemporaryDirectory() as directory:
        recording = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
            .training(
                train_batch_size_per_learner=2000,
                minibatch_size=250,
                num_epochs=6,
                lr=3e-4,
            )
            .offline_data(output=directory, output_write_remaining_data=True)
            .debugging(seed=0)
        )
        with recording.build() as ppo:
            for _ in range(iterations):
                print("PPO", ppo.train()["env_runners"]["episode_return_mean"])
        cloning = (
            BCConfig()
            .environment(
                "CartPole-v1"
            )  # for evaluation; training reads files only
            .offline_data(input_=directory, dataset_num_iters_per_learner=20)
            .training(lr=1e-3, train_batch_size_per_learner=256)
            .evaluation(evaluation_interval=1, evaluation_duration=5)
            .debugging(seed=0)
        )
        with cloning.build() as bc:
            for _ in range(iterations):
                print(
                    "BC",
                    bc.train()["evaluation"]["env_runners"][
                        "episode_return_mean"
                    ],
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
