"""Learner pipelines: shaped rewards, stacked observations on both sides, the ready-made frame stacking."""

from collections import Counter

import gymnasium as gym
import numpy as np

from rlzmq import Columns, ConnectorV2, FrameStacking, PPOConfig


class CountBasedIntrinsicRewards(ConnectorV2):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._counts = Counter()

    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):
        for sa_episode in self.single_agent_episode_iterator(
            episodes=episodes, agents_that_stepped_only=False
        ):
            observations = sa_episode.get_observations(slice(None, -1))
            rewards = sa_episode.get_rewards()
            for i, (obs, rew) in enumerate(zip(observations, rewards, strict=True)):
                obs = tuple(obs)
                self._counts[obs] += 1
                rew += 1 / self._counts[obs]
                sa_episode.set_rewards(new_data=rew, at_indices=i)
        return batch


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0)
    .learners(learner_connector=lambda obs_space, act_space: CountBasedIntrinsicRewards())
)
algo = config.build()
algo.train()
algo.stop()


class StackFourObservations(ConnectorV2):
    def __init__(
        self, input_observation_space=None, input_action_space=None, *, as_learner_connector=False, **kwargs
    ):
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self._as_learner_connector = as_learner_connector

    def recompute_output_observation_space(self, input_observation_space, input_action_space):
        assert isinstance(input_observation_space, gym.spaces.Box)
        return gym.spaces.Box(
            low=np.tile(input_observation_space.low, 4),
            high=np.tile(input_observation_space.high, 4),
            dtype=input_observation_space.dtype,
        )

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for sa_episode in self.single_agent_episode_iterator(
            episodes, agents_that_stepped_only=not self._as_learner_connector
        ):
            steps = range(len(sa_episode)) if self._as_learner_connector else [None]
            for t in steps:
                last_4_obs = sa_episode.get_observations(
                    indices=[-4, -3, -2, -1] if t is None else slice(t - 3, t + 1),
                    neg_index_as_lookback=t is not None,
                    fill=0.0,
                )
                self.add_batch_item(
                    batch=batch,
                    column=Columns.OBS,
                    item_to_add=np.concatenate(last_4_obs, axis=0),
                    single_agent_episode=sa_episode,
                )
        return batch


config = PPOConfig().environment("CartPole-v1")
config.env_runners(
    num_env_runners=0, env_to_module_connector=lambda env, spaces, device: StackFourObservations()
)
config.training(
    learner_connector=lambda obs_space, act_space: StackFourObservations(as_learner_connector=True)
)
algo = config.build()
assert algo.get_module().observation_space.shape == (16,)
algo.train()
algo.stop()

N = 4
config = PPOConfig().environment("CartPole-v1")
config.env_runners(
    num_env_runners=0, env_to_module_connector=lambda env, spaces, device: FrameStacking(num_frames=N)
)
config.training(
    learner_connector=lambda obs_space, act_space: FrameStacking(num_frames=N, as_learner_connector=True)
)
algo = config.build()
algo.train()
algo.stop()
