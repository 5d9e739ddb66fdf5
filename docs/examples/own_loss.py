# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Add a term to PPO's loss, and report it as a metric."""

import argparse

from rlzmq import PPOConfig, PPOLearner


class WithWeightDecay(PPOLearner):
    """PPO's loss, and 1e-4 times the sum of squared parameters."""

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        squares = sum(
            parameter.square().sum()
            for parameter in self.module[module_id].parameters()
        )
        self.metrics.log_value(
            (module_id, "sum_of_squares"), squares.item(), window=1
        )
        return loss + 1e-4 * squares


def main(iterations):
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .learners(learner_class=WithWeightDecay)
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=250,
            num_epochs=6,
            lr=3e-4,
        )
        .debugging(seed=0)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            squares = result["learners"]["default_policy"]["sum_of_squares"]
            print(
                f"return {result['env_runners']['episode_return_mean']:.1f}  squares {squares:.1f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
