# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""CrossQ (arXiv:1902.05605) outside of the package: SAC without target networks, and with batch normalization."""

import argparse
from itertools import pairwise

import torch

from rlzmq import (
    Columns,
    InferenceOnlyAPI,
    RLModuleSpec,
    SACConfig,
    SACLearner,
    TorchRLModule,
    TorchSquashedGaussian,
    discounts,
    frozen,
    importance_weights,
)
from rlzmq.algorithms.sac.sac_learner import critic_loss


def mlp(num_inputs, num_outputs, norm=torch.nn.Identity):
    widths = [num_inputs, 128, 128]
    layers = [norm(num_inputs)]
    for before, after in pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU(), norm(after)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, num_outputs))


class CrossQModule(TorchRLModule, InferenceOnlyAPI):
    action_dist_cls = TorchSquashedGaussian

    def setup(self):
        num_obs, num_actions = self.observation_space.shape[0], self.action_space.shape[0]
        self.pi = mlp(num_obs, 2 * num_actions)
        critics = (mlp(num_obs + num_actions, 1, torch.nn.BatchNorm1d) for _ in range(2))
        self.qfs = torch.nn.ModuleList(critics)
        self.log_alpha = torch.nn.Parameter(torch.zeros(()))

    def get_non_inference_attributes(self):  # what runners do not need
        return ["qfs", "log_alpha"]

    def values(self, obs, actions):
        return torch.cat([qf(torch.cat([obs, actions], -1)) for qf in self.qfs], -1)

    def _forward(self, batch, **kwargs):
        logits = self.pi(batch[Columns.OBS])
        return {
            Columns.ACTION_DIST_INPUTS: torch.cat(
                [logits[..., : logits.shape[-1] // 2], logits[..., logits.shape[-1] // 2 :].clamp(-10, 2)], -1
            )
        }

    def _forward_train(self, batch, **kwargs):
        obs = torch.cat([batch[Columns.OBS], batch[Columns.NEXT_OBS]])
        logits = self._forward({Columns.OBS: obs})[Columns.ACTION_DIST_INPUTS]
        actions, logp = TorchSquashedGaussian.from_logits(logits).rsample_and_logp()
        num = len(batch[Columns.OBS])
        # One pass for both: the batch's statistics are those of all its observations and actions.
        q, q_next = self.values(obs, torch.cat([batch[Columns.ACTIONS], actions[num:].detach()])).chunk(2)
        self.qfs.eval()
        with frozen(self.qfs.parameters()):
            q_curr = self.values(obs[:num], actions[:num]).amin(-1)
        self.qfs.train()
        return {
            "qf_preds": q,
            "q_next": q_next.detach().amin(-1),
            "logp_next": logp[num:].detach(),
            "q_curr": q_curr,
            "logp_resampled": logp[:num],
        }


class CrossQLearner(SACLearner):
    @classmethod
    def rl_module_required_apis(cls):
        return []  # no target networks

    def compute_critic_loss(self, module, config, batch, fwd_out, alpha):
        soft_value = fwd_out["q_next"] - alpha * fwd_out["logp_next"]
        targets = batch[Columns.REWARDS] + discounts(batch, config.gamma) * soft_value
        return critic_loss(
            q_BC=fwd_out["qf_preds"], targets_B=targets, weights_B=importance_weights(batch), kind="mse"
        )


class CrossQConfig(SACConfig):
    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        self.rl_module(rl_module_spec=RLModuleSpec(module_class=CrossQModule))
        self.training(learner_class=CrossQLearner)


def main(iterations, seed):
    config = CrossQConfig().environment("Pendulum-v1").env_runners(num_env_runners=0).debugging(seed=seed)
    config.training(actor_lr=1e-3, critic_lr=1e-3, alpha_lr=1e-3, train_batch_size=128)
    config.training(replay_buffer_config={"type": "EpisodeReplayBuffer"})
    config.reporting(metrics_num_episodes_for_smoothing=5, min_sample_timesteps_per_iteration=1000)
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
