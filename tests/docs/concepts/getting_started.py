"""Getting started: configure, train, save, evaluate, act with the module; docs/examples has own envs and modules."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from rlzmq import PPOConfig, RLModule

config = PPOConfig().environment("Pendulum-v1")
config.env_runners(num_env_runners=2)
config.training(lr=0.0002, train_batch_size_per_learner=200, num_epochs=2)
ppo = config.build_algo()
for _ in range(2):
    ppo.train()
checkpoint_path = ppo.save_to_path()

config.evaluation(
    evaluation_interval=1,
    evaluation_num_env_runners=2,
    evaluation_duration_unit="episodes",
    evaluation_duration=2,
)
ppo_with_evaluation = config.build_algo()
assert ppo_with_evaluation.train()["evaluation"]["env_runners"]["num_episodes"] == 2
ppo_with_evaluation.stop()

rl_module = RLModule.from_checkpoint(
    Path(checkpoint_path) / "learner_group" / "learner" / "rl_module" / "default_policy"
)
env = gym.make("Pendulum-v1", max_episode_steps=20)
episode_return, done = 0.0, False
obs, info = env.reset()
while not done:
    model_outputs = rl_module.forward_inference({"obs": torch.from_numpy(obs).unsqueeze(0)})
    action_dist_params = model_outputs["action_dist_inputs"][0].numpy()
    greedy_action = np.clip(
        action_dist_params[0:1], a_min=env.action_space.low[0], a_max=env.action_space.high[0]
    )
    obs, reward, terminated, truncated, info = env.step(greedy_action)
    episode_return += reward
    done = terminated or truncated
assert episode_return < 0.0
assert type(ppo.get_module("default_policy")) is type(ppo.get_module())
ppo.stop()
