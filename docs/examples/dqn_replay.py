# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Train DQN from a prioritized replay buffer."""

import argparse

from rlzmq import DQNConfig


def main(iterations):
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .training(
            lr=5e-4,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=200,
            replay_buffer_config={
                "type": "PrioritizedEpisodeReplayBuffer",
                "capacity": 50_000,
            },
            n_step=(2, 5),
            epsilon=[(0, 1.0), (10_000, 0.02)],
        )
        .reporting(min_sample_timesteps_per_iteration=1000)
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            buffer = result["learners"]["__all_modules__"]["batch_source"]
            print(
                f"return {result['env_runners']['episode_return_mean']:.1f}  ratio {buffer['train_ratio']:.1f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    main(parser.parse_args().iterations)
