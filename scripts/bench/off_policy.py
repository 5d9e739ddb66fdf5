"""DQN and SAC end to end, against RLlib and Stable-Baselines3.

Env steps per second of whole runs in one process with one thread: CartPole-v1 (DQN) and Pendulum-v1 (SAC), one
environment, one minibatch per env step. Against RLlib: its defaults, which are also rlzmq's (DQN: double and
dueling, prioritized replay, batches of 32, tanh 2×256; SAC: twin critics, prioritized replay, batches of 256,
2×256). Against Stable-Baselines3: what it has, so a single Q network without dueling and a uniform buffer; same
widths, batches, target updates and clipping. "Eight steps at a time": eight minibatches after every eight env
steps. "As in the RL Zoo" are the settings that Stable-Baselines3's RL Zoo tuned for DQN on CartPole-v1: 128
minibatches of 64 rows after every 256 env steps. Each side trains past its warm-up before its first turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from scripts.bench._core import Comparison, Side, Turn, timed
from scripts.bench.ppo import trained

ENVS = {"dqn": "CartPole-v1", "sac": "Pendulum-v1"}
WARM_UP = {"dqn": 200, "sac": 300}  # env steps before the first update
HIDDENS = [256, 256]
CAPACITY = 50_000
ZOO: dict[str, Any] = {  # by Stable-Baselines3's names
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_final_eps": 0.04,
}


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for algorithm in ENVS:
        settings = {"algorithm": algorithm}
        yield Comparison(
            f"{algorithm.upper()} as RLlib",
            {"rlzmq": Side(rlzmq, settings), "RLlib": Side(rllib, settings, "rllib")},
            turn_s=4.0,
        )
        for num_steps, title in ((1, ""), (8, ", eight steps at a time")):
            settings = {"algorithm": algorithm, "num_steps": num_steps}
            yield Comparison(
                f"{algorithm.upper()} as Stable-Baselines3{title}",
                {"rlzmq": Side(rlzmq, settings | {"as_sb3": True}), "SB3": Side(sb3, settings, "sb3")},
                turn_s=4.0,
            )
    yield Comparison(
        "DQN as in the RL Zoo", {"rlzmq": Side(rlzmq_zoo), "SB3": Side(sb3_zoo, {}, "sb3")}, turn_s=4.0
    )


def configured(config: Any, algorithm: str) -> Any:
    """Set what is the same in rlzmq and RLlib."""
    config.environment(ENVS[algorithm]).debugging(seed=0)
    config.reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
    return config.training(num_steps_sampled_before_learning_starts=WARM_UP[algorithm])


def rlzmq(algorithm: str, as_sb3: bool = False, num_steps: int = 1) -> Turn:
    """As many minibatches as env steps, after every `num_steps` of these."""
    from rlzmq.algorithms.dqn import DQNConfig
    from rlzmq.algorithms.sac import SACConfig

    config: Any = configured((DQNConfig if algorithm == "dqn" else SACConfig)(), algorithm)
    config.env_runners(rollout_fragment_length=num_steps)
    config.training(training_intensity=config.train_batch_size_per_learner)
    if as_sb3:
        config.training(replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": CAPACITY})
        if algorithm == "dqn":
            config.training(double_q=False, dueling=False)
        else:
            config.rl_module(model_config={"fcnet_activation": "relu", "head_fcnet_activation": "relu"})
    return trained(config.build_algo(), WARM_UP[algorithm])


def rlzmq_zoo() -> Turn:
    from rlzmq.algorithms.dqn import DQNConfig

    config: Any = DQNConfig().environment("CartPole-v1").debugging(seed=0)
    config.env_runners(rollout_fragment_length=ZOO["train_freq"])
    config.training(
        double_q=False,
        dueling=False,
        lr=ZOO["learning_rate"],
        gamma=ZOO["gamma"],
        grad_clip=10.0,  # Stable-Baselines3's default
        epsilon=[(0, 1.0), (8000, ZOO["exploration_final_eps"])],
        train_batch_size_per_learner=ZOO["batch_size"],
        training_intensity=ZOO["gradient_steps"] * ZOO["batch_size"] / ZOO["train_freq"],
        num_steps_sampled_before_learning_starts=ZOO["learning_starts"],
        target_network_update_freq=ZOO["target_update_interval"],
        replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": ZOO["buffer_size"]},
    )
    config.rl_module(model_config={"fcnet_hiddens": HIDDENS, "fcnet_activation": "relu"})
    config.reporting(min_sample_timesteps_per_iteration=2560, min_time_s_per_iteration=0)
    return trained(config.build_algo(), 2 * ZOO["learning_starts"])


def rllib(algorithm: str) -> Turn:
    """Everything in the driver's process."""
    import ray
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.algorithms.sac import SACConfig

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    config: Any = configured((DQNConfig if algorithm == "dqn" else SACConfig)(), algorithm)
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    return trained(config.build_algo(), WARM_UP[algorithm])


def sb3(algorithm: str, num_steps: int) -> Turn:
    """The same network, batches and updates per env step."""
    import stable_baselines3
    import torch

    common: dict[str, Any] = {
        "env": ENVS[algorithm],
        "learning_starts": WARM_UP[algorithm],
        "buffer_size": CAPACITY,
        "train_freq": num_steps,
        "gradient_steps": num_steps,
        "seed": 0,
        "device": "cpu",
    }
    model: Any
    if algorithm == "dqn":
        model = stable_baselines3.DQN(
            "MlpPolicy",
            learning_rate=5e-4,
            batch_size=32,
            target_update_interval=500,
            max_grad_norm=40.0,
            policy_kwargs={"net_arch": HIDDENS, "activation_fn": torch.nn.Tanh},
            **common,
        )
    else:
        model = stable_baselines3.SAC(
            "MlpPolicy", learning_rate=3e-4, batch_size=256, policy_kwargs={"net_arch": HIDDENS}, **common
        )

    return learned(model, 100, WARM_UP[algorithm] + 100)


def sb3_zoo() -> Turn:
    import stable_baselines3

    model = stable_baselines3.DQN(
        "MlpPolicy",
        "CartPole-v1",
        exploration_fraction=0.16,
        policy_kwargs={"net_arch": HIDDENS},
        seed=0,
        device="cpu",
        **ZOO,
    )
    return learned(model, 2560, 2 * ZOO["learning_starts"])


def learned(model: Any, num_steps: int, warm_up: int) -> Turn:
    """Turns of so many env steps of a model of Stable-Baselines3, which first takes its warm-up."""

    def train(num_steps: int = num_steps) -> int:
        before: int = model.num_timesteps
        model.learn(num_steps, reset_num_timesteps=False)
        return model.num_timesteps - before

    train(warm_up)
    return timed(train)
