"""Getting started: configure, train, save, evaluate, act with the module, an env and a module of one's own."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from rlzmq import PPOConfig, RLModule, RLModuleSpec, TorchRLModule

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


class ParrotEnv(gym.Env):
    """Rewards an agent for repeating what it sees."""

    def __init__(self, config=None):
        self.observation_space = config.get("obs_act_space", gym.spaces.Box(-1.0, 1.0, (1,), np.float32))
        self.action_space = self.observation_space
        self._cur_obs = None
        self._episode_len = 0

    def reset(self, *, seed=None, options=None):
        self._episode_len = 0
        self._cur_obs = self.observation_space.sample()
        return self._cur_obs, {}

    def step(self, action):
        self._episode_len += 1
        terminated = truncated = self._episode_len >= 10
        reward = -sum(abs(self._cur_obs - action))
        self._cur_obs = self.observation_space.sample()
        return self._cur_obs, reward, terminated, truncated, {}


config = PPOConfig().environment(ParrotEnv)
ppo_w_custom_env = config.build_algo()
ppo_w_custom_env.train()
ppo_w_custom_env.stop()


class CustomTorchRLModule(TorchRLModule):
    def setup(self):
        in_size = self.observation_space.shape[0]
        out_size = self.action_space.n
        self._policy_net = torch.nn.Sequential(
            torch.nn.LayerNorm(in_size), torch.nn.Linear(in_size, 64), torch.nn.Linear(64, out_size)
        )

    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": self._policy_net(batch["obs"])}


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .rl_module(rl_module_spec=RLModuleSpec(module_class=CustomTorchRLModule))
)
spec = config.get_rl_module_spec(env=gym.make("CartPole-v1"))
assert spec.module_class is CustomTorchRLModule
assert spec.build().forward_exploration({"obs": torch.zeros(3, 4)})["action_dist_inputs"].shape == (3, 2)
