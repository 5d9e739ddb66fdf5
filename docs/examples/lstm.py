# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Give the model a memory: an LSTM balances a pole whose velocities it does not see."""

import argparse

from rlzmq import DefaultModelConfig, PPOConfig
from rlzmq.envs.examples import StatelessCartPole


def main(iterations):
    config = (
        PPOConfig()
        .environment(StatelessCartPole)  # only position and angle
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            lr=3e-4,
            train_batch_size_per_learner=2000,
            minibatch_size=500,
            num_epochs=6,
            vf_loss_coeff=0.05,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64],
                use_lstm=True,
                lstm_cell_size=64,
                max_seq_len=20,
                vf_share_layers=True,
            )
        )
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            print(algo.train()["env_runners"]["episode_return_mean"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    main(parser.parse_args().iterations)
