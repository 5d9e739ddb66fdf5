# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq[onnx,serve]"]
# ///
"""Export a trained policy as a file, and serve it to other programs."""

import argparse
import json
import tempfile
import urllib.request

import gymnasium as gym

from rlzmq import Policy, PolicyServer, PPOConfig, export_policy


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
                print(algo.train()["env_runners"]["episode_return_mean"])
            checkpoint = algo.save_to_path(f"{directory}/checkpoint")

        export_policy(
            Policy.load(checkpoint), f"{directory}/policy.onnx"
        )  # runs without rlzmq

        with PolicyServer(checkpoint, http="127.0.0.1:0") as server:
            url, headers = (
                f"{server.http_url}/v1/act",
                {"Authorization": f"Bearer {server.token}"},
            )
            env = gym.make("CartPole-v1")
            observation, _ = env.reset(seed=0)
            steps, is_over = 0, False
            while not is_over:
                body = json.dumps({"obs": observation.tolist()}).encode()
                with urllib.request.urlopen(
                    urllib.request.Request(url, body, headers)
                ) as answer:
                    action = json.load(answer)["action"]
                observation, _, terminated, truncated, _ = env.step(action)
                steps, is_over = steps + 1, terminated or truncated
            print(f"the served policy balanced the pole for {steps} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
