# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Train APPO asynchronously: two env runners sample while the learner trains."""

import argparse

from rlzmq import APPOConfig


def main(iterations):
    config = (
        APPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=2,
            num_envs_per_env_runner=8,
            rollout_fragment_length=32,
        )
        .learners(num_learners=1)
        .training(
            lr=5e-4, train_batch_size_per_learner=512, entropy_coeff=0.005
        )
        .reporting(min_time_s_per_iteration=2.0)
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            print(
                f"return {result['env_runners']['episode_return_mean']:.1f}  {result['accounting']}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=15)
    main(parser.parse_args().iterations)
