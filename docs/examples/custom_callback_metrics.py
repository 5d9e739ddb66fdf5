# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Log a metric of your own in each episode: how far the pole leans."""

import argparse

import numpy as np

from rlzmq import PPOConfig, RLlibCallback


class PoleAngle(RLlibCallback):
    """Reports the mean and the largest angle of an episode's observations, in radians."""

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        angles = np.abs(np.asarray(episode.get_observations())[:, 2])
        metrics_logger.log_value("pole_angle_mean", float(angles.mean()))
        metrics_logger.log_value(
            "pole_angle_max", float(angles.max()), reduce="max"
        )

    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        result["is_upright"] = result["env_runners"]["pole_angle_mean"] < 0.05


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
        .callbacks(PoleAngle)
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            runners = result["env_runners"]
            print(
                f"angle {runners['pole_angle_mean']:.3f} (at most {runners['pole_angle_max']:.3f} rad)"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
