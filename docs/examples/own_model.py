# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Train PPO with a torch module of your own."""

import argparse

import torch

from rlzmq import (
    Columns,
    PPOConfig,
    RLModuleSpec,
    TorchRLModule,
    ValueFunctionAPI,
)


class ResidualModel(TorchRLModule, ValueFunctionAPI):
    """Two residual blocks, shared by the policy's head and the value's."""

    def setup(self):
        width = self.model_config["width"]
        self.stem = torch.nn.Linear(self.observation_space.shape[0], width)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Linear(width, width) for _ in range(2)]
        )
        self.pi = torch.nn.Linear(width, int(self.action_space.n))
        self.vf = torch.nn.Linear(width, 1)

    def embed(self, obs):
        x = self.stem(obs)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

    def _forward(self, batch, **kwargs):
        return {
            Columns.ACTION_DIST_INPUTS: self.pi(self.embed(batch[Columns.OBS]))
        }

    def compute_values(self, batch, embeddings=None):
        return self.vf(self.embed(batch[Columns.OBS])).squeeze(-1)


def main(iterations):
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=ResidualModel, model_config={"width": 64}
            )
        )
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=250,
            num_epochs=6,
            lr=3e-4,
        )
        .debugging(seed=0)
    )
    with config.build() as algo:
        print(algo.get_module())
        for _ in range(iterations):
            print(algo.train()["env_runners"]["episode_return_mean"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
