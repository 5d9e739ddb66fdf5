"""Env-to-module pipelines: built by hand, called on hand-made episodes, preprocessors, new columns."""

import gymnasium as gym
import numpy as np

from rlzmq import (
    ConnectorV2,
    DefaultModelConfig,
    PPOConfig,
    SingleAgentEpisode,
    SingleAgentObservationPreprocessor,
)

config = PPOConfig().environment("CartPole-v1")
env = gym.make("CartPole-v1")
env_to_module = config.build_env_to_module_connector(env=env, spaces=None)
env_to_module = config.build_env_to_module_connector(
    env=None, spaces={"__env_single__": (env.observation_space, env.action_space)}
)

episode1 = SingleAgentEpisode()
episode2 = SingleAgentEpisode()
obs, _ = env.reset()
episode1.add_env_reset(observation=obs)
action = 0
obs, _, _, _, _ = env.step(action)
episode1.add_env_step(observation=obs, action=action, reward=1.0)
obs, _ = env.reset()
episode2.add_env_reset(observation=obs)
batch = env_to_module(episodes=[episode1, episode2], batch={}, rl_module=None, explore=True)
assert batch["obs"].shape == (2, 4)

config.rl_module(model_config=DefaultModelConfig(use_lstm=True))
rl_module = config.get_rl_module_spec(env=env).build()
episode = SingleAgentEpisode()
obs, _ = env.reset()
episode.add_env_reset(observation=obs)
batch = env_to_module(episodes=[episode], batch={}, rl_module=rl_module, explore=True)
assert {"obs", "state_in"} <= batch.keys()
assert batch["state_in"]["h"].shape[0] == 1


class AddPastThreeRewards(SingleAgentObservationPreprocessor):
    def recompute_output_observation_space(self, in_obs_space, in_act_space):
        assert isinstance(in_obs_space, gym.spaces.Box)
        return gym.spaces.Box(-100.0, 100.0, (in_obs_space.shape[0] + 3,), np.float32)

    def preprocess(self, observation, episode):
        past_3_rewards = episode.get_rewards(indices=[-3, -2, -1], fill=0.0)
        return np.concatenate([observation, np.array(past_3_rewards, np.float32)])


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(
        num_env_runners=0, env_to_module_connector=lambda env, spaces, device: [AddPastThreeRewards()]
    )
)
algo = config.build()
assert algo.get_module().observation_space.shape == (7,)
algo.train()
algo.stop()


class AddNewColumnToBatch(ConnectorV2):
    def __init__(
        self, input_observation_space=None, input_action_space=None, *, col_name="last_3_rewards_mean"
    ):
        super().__init__(input_observation_space, input_action_space)
        self.col_name = col_name

    def __call__(self, *, episodes, batch, rl_module, explore, shared_data, **kwargs):
        for sa_episode in self.single_agent_episode_iterator(episodes):
            last_3_rewards = sa_episode.get_rewards(indices=[-3, -2, -1], fill=0.0)
            self.add_batch_item(
                batch=batch,
                column=self.col_name,
                item_to_add=np.mean(last_3_rewards),
                single_agent_episode=sa_episode,
            )
        return batch


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(env_to_module_connector=lambda env, spaces, device: AddNewColumnToBatch())
)
env_to_module = config.build_env_to_module_connector(env=env, spaces=None)
batch = env_to_module(episodes=[episode1], batch={}, rl_module=None, explore=True)
assert float(batch["last_3_rewards_mean"][0]) == np.float32(1.0 / 3.0)

# the callable may also take the env alone
config.env_runners(env_to_module_connector=lambda env: AddNewColumnToBatch())
assert len(config.build_env_to_module_connector(env=env)) == len(env_to_module)
