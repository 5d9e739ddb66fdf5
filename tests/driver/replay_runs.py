"""Small runs of DQN and SAC, for tests of what all algorithms with a replay buffer share."""

from __future__ import annotations

from typing import Any

from rlzmq import DQNConfig, SACConfig
from rlzmq.envs.examples import MultiAgentCartPole

FRESH, BATCH, RATIO, WARM_UP = 40, 32, 2.5, 100


def replay_config(
    num_env_runners: int, num_learners: int, staleness: int = 0, algorithm: str = "dqn"
) -> DQNConfig | SACConfig:
    num_envs, runners = 4, max(num_env_runners, 1)
    config: Any = DQNConfig().environment("CartPole-v1").training(lr=1e-3, epsilon=[(0, 1.0), (400, 0.1)])
    if algorithm == "sac":
        config = SACConfig().environment("Pendulum-v1").training(actor_lr=1e-3, alpha_lr=1e-2)
    elif "multi-agent" in algorithm:
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies=["p0", "p1"], policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
    config = (
        config.env_runners(
            num_env_runners=num_env_runners,
            num_envs_per_env_runner=num_envs,
            rollout_fragment_length=FRESH // (num_envs * runners),
        )
        .learners(num_learners=num_learners)
        .training(
            train_batch_size=BATCH,
            n_step=(1, 3),
            gamma=0.9,
            training_intensity=RATIO,
            num_steps_sampled_before_learning_starts=WARM_UP,
            target_network_update_freq=80,
            staleness=staleness,
        )
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .reporting(min_sample_timesteps_per_iteration=1, min_time_s_per_iteration=0)
        .debugging(seed=3)
    )
    if "recurrent" in algorithm:
        config.training(n_step=1, burn_in_len=2, replay_buffer_config={"type": "EpisodeReplayBuffer"})
        config.rl_module(
            model_config={"fcnet_hiddens": [16], "use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 6}
        )
    return config  # type: ignore[no-any-return]
