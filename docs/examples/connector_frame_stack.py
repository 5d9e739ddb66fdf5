# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Stack the newest four observations, so that a model without memory sees velocities."""

import argparse

from rlzmq import FrameStackingEnvToModule, FrameStackingLearner, PPOConfig
from rlzmq.envs.examples import StatelessCartPole


def main(iterations):
    config = (
        PPOConfig()
        .environment(StatelessCartPole)  # only position and angle
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=8,
            env_to_module_connector=lambda env, spaces, device: (
                FrameStackingEnvToModule(num_frames=4)
            ),
        )
        .training(
            learner_connector=lambda observation_space, action_space: (
                FrameStackingLearner(num_frames=4)
            ),
            train_batch_size_per_learner=2000,
            minibatch_size=250,
            num_epochs=6,
            lr=3e-4,
        )
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            print(algo.train()["env_runners"]["episode_return_mean"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
