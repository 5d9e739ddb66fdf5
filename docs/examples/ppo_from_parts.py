# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Write PPO yourself, from an env runner, a module, an advantage estimator and a learner, in one file.

Its weights are those of ``PPOConfig().build()`` with the same settings, bit for bit.
"""

import argparse

import torch

from rlzmq import (
    Columns,
    GeneralAdvantageEstimation,
    PPOConfig,
    SingleAgentEnvRunner,
    TorchLearner,
)


class ClippedSurrogateLearner(TorchLearner):
    """Trains on advantages with PPO's loss (arXiv:1707.06347). Epochs, minibatches and steps are the base class's."""

    def make_estimator(self):
        """The last piece of the pipeline from episodes to columns: an estimate of each step's advantage."""
        return GeneralAdvantageEstimation(
            gamma=self.config.gamma,
            lambda_=self.config.lambda_,
            standardize=self.config.standardize_advantages,
        )

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        """Return policy loss + value loss − entropy bonus of a minibatch, a 0-d tensor."""
        module = self.module[module_id]
        dist = module.get_train_action_dist_cls().from_logits(
            fwd_out[Columns.ACTION_DIST_INPUTS]
        )
        ratio = torch.exp(
            dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
        )
        clipped = ratio.clamp(1.0 - config.clip_param, 1.0 + config.clip_param)
        advantages = batch[Columns.ADVANTAGES]
        policy_loss = -torch.minimum(
            advantages * ratio, advantages * clipped
        ).mean()
        values = module.compute_values(
            batch, embeddings=fwd_out.get(Columns.EMBEDDINGS)
        )
        value_loss = (values - batch[Columns.VALUE_TARGETS]).square().mean()
        entropy = dist.entropy().mean()
        self.log_stats(
            module_id,
            {
                "policy_loss": policy_loss,
                "vf_loss": value_loss,
                "entropy": entropy,
            },
        )
        return (
            policy_loss
            + config.vf_loss_coeff * value_loss
            - config.entropy_coeff * entropy
        )


class PPO:
    """One runner that samples, one learner that trains.

    Args:
        config: A PPOConfig.
    """

    def __init__(self, config):
        self.config = config
        self.runner = SingleAgentEnvRunner(config=config)
        self.learner = ClippedSurrogateLearner(
            config=config,
            module_spec=config.get_multi_rl_module_spec(env=self.runner.env),
        )
        self.learner.build()
        self.num_env_steps = 0
        self.publish_weights()

    def train(self):
        """Sample a batch, train on it, and act with the new weights from then on."""
        fragments = self.sample(self.config.train_batch_size_per_learner)
        self.num_env_steps += sum(
            fragment.num_env_steps for fragment in fragments
        )
        result = self.learner.update(
            episodes=fragments,
            timesteps={"num_env_steps_sampled_lifetime": self.num_env_steps},
        )
        self.publish_weights()
        returns = [
            r
            for fragment in fragments
            for r in fragment.meta["episode_metrics"]["returns"]
        ]
        return {"returns": returns, **result["default_policy"]}

    def sample(self, num_env_steps):
        """Return fragments with at least this many steps: an env's reset is part of a vector step, but no env step."""
        fragments = []
        while num_env_steps > 0:
            fragments.append(
                self.runner.sample_lease(
                    -(-num_env_steps // self.runner.num_envs)
                )
            )
            num_env_steps -= fragments[-1].num_env_steps
        return fragments

    def publish_weights(self):
        """Give the learner's weights, and their version, to the runner."""
        self.runner.set_state(
            self.learner.get_state(["rl_module", "weights_seq_no"])
        )


def make_config(seed):
    """PPO for CartPole without the penalty on the divergence from the old policy."""
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            train_batch_size_per_learner=1024,
            minibatch_size=128,
            num_epochs=6,
            lr=1e-3,
            lambda_=0.95,
            use_kl_loss=False,
            entropy_coeff=0.01,
        )
        .debugging(seed=seed)
    )


def main(iterations):
    ppo = PPO(make_config(seed=0))
    for iteration in range(iterations):
        result = ppo.train()
        returns = result["returns"]
        mean = f"{sum(returns) / len(returns):.1f}" if returns else "none ended"
        print(f"{iteration:3}  return {mean}  entropy {result['entropy']:.2f}")
    ppo.runner.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    main(parser.parse_args().iterations)
