# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""TD3 (arXiv:1802.09477) outside of the package: a module, a loss and a config."""

import argparse
from itertools import pairwise

import torch

from rlzmq import (
    Algorithm,
    Columns,
    InferenceOnlyAPI,
    OffPolicyConfig,
    ReplayLearner,
    RLModuleSpec,
    TargetNetworkAPI,
    TorchRLModule,
    discounts,
    frozen,
    importance_weights,
    target_outputs,
)


def mlp(num_inputs, num_outputs, *last):
    widths = [num_inputs, 64, 64]
    hidden = [
        layer
        for pair in pairwise(widths)
        for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(64, num_outputs), *last)


class MyTD3Module(TorchRLModule, TargetNetworkAPI, InferenceOnlyAPI):
    """A policy with actions in (-1, 1), which are scaled to the environment's, two critics, and targets of all."""

    networks_with_target = ("pi", "qfs")  # target_pi, target_qfs

    def setup(self):
        num_obs, num_actions = (
            self.observation_space.shape[0],
            self.action_space.shape[0],
        )
        self.pi = mlp(num_obs, num_actions, torch.nn.Tanh())
        self.qfs = torch.nn.ModuleList(
            mlp(num_obs + num_actions, 1) for _ in range(2)
        )
        self.make_target_networks()

    def get_non_inference_attributes(self):  # what runners do not need
        return ["qfs", "target_pi", "target_qfs"]

    def values(self, qfs, obs, actions):
        return torch.cat([qf(torch.cat([obs, actions], -1)) for qf in qfs], -1)

    def _forward_inference(self, batch, **kwargs):
        return {Columns.ACTIONS: self.pi(batch[Columns.OBS])}

    def _forward_exploration(self, batch, *, t=0, **kwargs):
        actions = self.pi(batch[Columns.OBS])
        generator = torch.Generator().manual_seed(
            self.exploration_seed + t
        )  # repeats with the run's seed
        return {
            Columns.ACTIONS: (
                actions + 0.1 * torch.randn(actions.shape, generator=generator)
            ).clamp(-1, 1)
        }

    def _forward_train(self, batch, **kwargs):
        return {
            "qf_preds": self.values(
                self.qfs, batch[Columns.OBS], batch[Columns.ACTIONS]
            )
        }

    def forward_target(self, batch, **kwargs):
        actions = self.target_pi(batch[Columns.OBS])
        noise = (0.2 * torch.randn_like(actions)).clamp(-0.5, 0.5)
        return self.values(
            self.target_qfs, batch[Columns.OBS], (actions + noise).clamp(-1, 1)
        ).amin(-1)


class MyTD3Learner(ReplayLearner):
    def configure_optimizers_for_module(self, module_id, config):
        module = self.module[module_id]
        parts = {
            "qf": (list(module.qfs.parameters()), 1e-3),
            "policy": (list(module.pi.parameters()), 1e-3),
        }
        self.register_adam_optimizers(
            module_id, parts, every={"policy": config.policy_delay}
        )

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        module = self.module[module_id]
        q_next = target_outputs(module, {Columns.OBS: batch[Columns.NEXT_OBS]})
        targets = (
            batch[Columns.REWARDS] + discounts(batch, config.gamma) * q_next
        )
        errors = fwd_out["qf_preds"] - targets[:, None]
        loss = (
            (importance_weights(batch)[:, None] * errors.square()).mean(0).sum()
        )
        self.note_td_errors(
            module_id, batch, errors.abs().mean(-1)
        )  # priorities, if the buffer has some
        self.log_stats(
            module_id, {"qf_loss": loss, "qf_mean": fwd_out["qf_preds"].mean()}
        )
        if self.steps_optimizer(module_id, "policy"):
            with frozen(module.qfs.parameters()):
                q = module.values(
                    module.qfs[:1],
                    batch[Columns.OBS],
                    module.pi(batch[Columns.OBS]),
                )
            self.log_stats(module_id, {"policy_loss": -q.mean()})
            loss = loss - q.mean()
        return loss

    def updates_targets(self):
        return self.steps_optimizer(self.trained_module_ids[0], "policy")


class MyTD3Config(OffPolicyConfig):
    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or Algorithm)
        self.policy_delay = 2  # a new setting
        self.rl_module(rl_module_spec=RLModuleSpec(module_class=MyTD3Module))
        self.training(
            learner_class=MyTD3Learner,
            train_batch_size=128,
            tau=0.005,
            target_network_update_freq=0,
        )
        self.training(
            replay_buffer_config={
                "type": "EpisodeReplayBuffer",
                "capacity": 1_000_000,
            }
        )


def main(iterations, seed):
    config = (
        MyTD3Config()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0)
        .debugging(seed=seed)
    )
    config.reporting(metrics_num_episodes_for_smoothing=5)
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            print(
                result["env_runners"]["num_env_steps_sampled_lifetime"],
                result["env_runners"].get("episode_return_mean"),
                result["learners"]["default_policy"].get("policy_loss"),
            )
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.iterations, arguments.seed)
