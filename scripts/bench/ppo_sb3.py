"""PPO against Stable-Baselines3 with the settings of its RL Zoo for CartPole-v1: 8 environments, everything in one
process.

256 steps per update (32 from each environment), 20 epochs of one minibatch of 256, two tanh MLPs of 2×64, Adam
0.001, gamma 0.98, lambda 0.8, no KL term, gradients clipped to a norm of 0.5. The learning rate and the clipping
stay constant on both sides. Stable-Baselines3's environments are in its DummyVecEnv.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from scripts.bench._core import Comparison, Side, Turn, timed
from scripts.bench.ppo import trained


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    yield Comparison("8 envs", {"rlzmq": Side(rlzmq), "SB3": Side(sb3, peer="sb3")}, goal="≥ 3")


def rlzmq() -> Turn:
    from rlzmq import PPOConfig

    config = PPOConfig().environment("CartPole-v1").debugging(seed=0)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    config.training(lr=0.001, gamma=0.98, lambda_=0.8, clip_param=0.2, use_kl_loss=False, grad_clip=0.5)
    config.training(vf_loss_coeff=0.5, train_batch_size_per_learner=256, minibatch_size=256, num_epochs=20)
    config.rl_module(model_config={"fcnet_hiddens": [64, 64]}).reporting(min_time_s_per_iteration=0)
    return trained(config.build_algo())


def sb3() -> Turn:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=0),
        learning_rate=0.001,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        clip_range=0.2,
        seed=0,
        device="cpu",
    )

    def learn() -> int:
        before: int = model.num_timesteps
        model.learn(2560, reset_num_timesteps=False)
        return model.num_timesteps - before

    return timed(learn)
