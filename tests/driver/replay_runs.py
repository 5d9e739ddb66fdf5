"""Small runs of DQN and SAC, for tests of what all algorithms with a replay buffer share."""

from __future__ import annotations

from typing import Any

from rlzmq import DQNConfig, SACConfig
from tests.support.runs import small, two_agents

FRESH, BATCH, RATIO, WARM_UP = 40, 32, 2.5, 100


def replay_config(
    num_env_runners: int, num_learners: int, staleness: int = 0, algorithm: str = "dqn"
) -> DQNConfig | SACConfig:
    settings: dict[str, Any] = {
        "num_env_runners": num_env_runners,
        "num_envs_per_env_runner": 4,
        "rollout_fragment_length": FRESH // (4 * max(num_env_runners, 1)),
        "num_learners": num_learners,
        "train_batch_size": BATCH,
        "n_step": (1, 3),
        "gamma": 0.9,
        "training_intensity": RATIO,
        "num_steps_sampled_before_learning_starts": WARM_UP,
        "target_network_update_freq": 80,
        "staleness": staleness,
        "model_config": {"fcnet_hiddens": [16]},
        "min_sample_timesteps_per_iteration": 1,
        "min_time_s_per_iteration": 0.0,
        "seed": 3,
    }
    if algorithm == "sac":
        return small(SACConfig, "Pendulum-v1", actor_lr=1e-3, alpha_lr=1e-2, **settings)
    if "recurrent" in algorithm:
        settings |= {"n_step": 1, "burn_in_len": 2, "replay_buffer_config": {"type": "EpisodeReplayBuffer"}}
        settings["model_config"] |= {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 6}
    settings |= {"config_class": DQNConfig, "lr": 1e-3, "epsilon": [(0, 1.0), (400, 0.1)]}
    return two_agents(**settings) if "multi-agent" in algorithm else small(**settings)
