# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""CrossQ (arXiv:1902.05605) outside of the package: SAC without target networks, and with batch normalization."""

import argparse

import torch

from rlzmq import (
    Columns,
    DefaultSACModule,
    RLModuleSpec,
    SACConfig,
    TorchSquashedGaussian,
    frozen,
)


def critic(num_inputs, width=128):
    layers = [torch.nn.BatchNorm1d(num_inputs)]
    for num in (num_inputs, width):
        layers += [
            torch.nn.Linear(num, width),
            torch.nn.ReLU(),
            torch.nn.BatchNorm1d(width),
        ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))


class CrossQModule(DefaultSACModule):
    networks_with_target = ()

    def setup(self):
        super().setup()
        num_inputs = (
            self.observation_space.shape[0] + self.action_space.shape[0]
        )
        self.qfs = torch.nn.ModuleList(critic(num_inputs) for _ in range(2))

    def values(self, obs, actions):
        return torch.cat(
            [qf(torch.cat([obs, actions], -1)) for qf in self.qfs], -1
        )

    def _forward_train(self, batch, **kwargs):
        num = len(batch[Columns.OBS])
        obs = torch.cat([batch[Columns.OBS], batch[Columns.NEXT_OBS]])
        logits = self._forward({Columns.OBS: obs})[Columns.ACTION_DIST_INPUTS]
        actions, logp = TorchSquashedGaussian.from_logits(
            logits
        ).rsample_and_logp()
        # One pass for both: the batch's statistics are those of all its observations and actions.
        q, q_next = self.values(
            obs, torch.cat([batch[Columns.ACTIONS], actions[num:].detach()])
        ).chunk(2)
        self.qfs.eval()
        with frozen(self.qfs.parameters()):
            q_curr = self.values(obs[:num], actions[:num]).amin(-1)
        self.qfs.train()
        return {
            "qf_preds": q,
            "q_curr": q_curr,
            "logp_resampled": logp[:num],
            "q_target_next": q_next.amin(-1),
            "logp_next_resampled": logp[num:],
        }


class CrossQConfig(SACConfig):
    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        self.rl_module(rl_module_spec=RLModuleSpec(module_class=CrossQModule))


def main(iterations, seed):
    config = (
        CrossQConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0)
        .debugging(seed=seed)
    )
    config.training(
        actor_lr=1e-3, critic_lr=1e-3, alpha_lr=1e-3, train_batch_size=128
    )
    config.training(replay_buffer_config={"type": "EpisodeReplayBuffer"})
    config.reporting(
        metrics_num_episodes_for_smoothing=5,
        min_sample_timesteps_per_iteration=1000,
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            print(
                result["env_runners"]["num_env_steps_sampled_lifetime"],
                result["env_runners"].get("episode_return_mean"),
            )
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.iterations, arguments.seed)
