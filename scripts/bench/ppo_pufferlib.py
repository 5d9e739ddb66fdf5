"""PPO against PufferLib 3.0: 64 CartPoles, everything in one process.

4,096 steps per update (64 from each environment), one epoch of minibatches of 1,024, one shared layer of 64 GELU
units, Adam. PufferLib steps gymnasium's environment through its emulation with the backend Serial, and computes its
advantages anew before each minibatch, which it draws by priority. rlzmq steps the same environment, or gymnasium's
native vector version of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from scripts.bench._core import Comparison, Side, Turn, timed
from scripts.bench.ppo import trained

NUM_ENVS, HORIZON = 64, 64


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for name, mode, goal in (("gym env", "sync", "≥ 2"), ("native vector env", "vector_entry_point", "≥ 4")):
        sides = {"rlzmq": Side(rlzmq, {"mode": mode}), "PufferLib": Side(pufferlib, peer="pufferlib")}
        yield Comparison(name, sides, goal=goal)


def rlzmq(mode: str) -> Turn:
    from rlzmq import PPOConfig

    config = PPOConfig().environment("CartPole-v1").debugging(seed=0).reporting(min_time_s_per_iteration=0)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS, gym_env_vectorize_mode=mode)
    config.rl_module(
        model_config={"fcnet_hiddens": [64], "fcnet_activation": "gelu", "vf_share_layers": True}
    )
    config.training(train_batch_size_per_learner=NUM_ENVS * HORIZON, minibatch_size=1024, num_epochs=1)
    config.training(lr=0.001, use_kl_loss=False, grad_clip=1.5, entropy_coeff=0.001)
    return trained(config.build_algo())


def pufferlib() -> Turn:
    import gymnasium as gym
    import pufferlib.emulation
    import pufferlib.models
    import pufferlib.vector
    from pufferlib import pufferl

    def cartpole(buf: Any = None, seed: int = 0) -> Any:
        return pufferlib.emulation.GymnasiumPufferEnv(gym.make("CartPole-v1"), buf=buf, seed=seed)

    envs = pufferlib.vector.make(cartpole, backend=pufferlib.vector.Serial, num_envs=NUM_ENVS)
    policy = pufferlib.models.Default(envs.driver_env, hidden_size=64)
    sys.argv[1:] = []  # which load_config parses
    settings = pufferl.load_config("default")["train"]
    settings |= {
        "device": "cpu",
        "optimizer": "adam",
        "batch_size": NUM_ENVS * HORIZON,
        "bptt_horizon": HORIZON,
    }
    settings |= {"minibatch_size": 1024, "learning_rate": 0.001, "use_rnn": False, "env": "cartpole"}
    trainer = pufferl.PuffeRL(settings, envs, policy)

    def train() -> int:
        before: int = trainer.global_step
        trainer.evaluate()
        trainer.train()
        return trainer.global_step - before

    return timed(train)
