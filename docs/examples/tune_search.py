# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq[tune]"]
# ///
"""Search for a learning rate: random values, of which ASHA ends the bad ones early."""

import argparse
import tempfile

from rlzmq import PPOConfig, tune
from rlzmq.tune.schedulers import ASHAScheduler


def main(iterations):
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            lr=tune.loguniform(1e-5, 1e-2),
            train_batch_size_per_learner=1000,
            minibatch_size=250,
            num_epochs=6,
        )
    )
    tuner = tune.Tuner(
        "PPO",
        param_space=config,
        tune_config=tune.TuneConfig(
            metric="env_runners/episode_return_mean",
            mode="max",
            num_samples=4,
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
            scheduler=ASHAScheduler(max_t=iterations, reduction_factor=2),
        ),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp()),
    )
    results = tuner.fit()
    for result in results:
        print(
            result.config["lr"],
            result.metrics["env_runners"]["episode_return_mean"],
        )
    print("best:", results.get_best_result().config["lr"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
