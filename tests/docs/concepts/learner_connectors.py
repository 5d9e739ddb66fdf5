"""Learner pipelines: shaped rewards, and frames that are stacked on both sides."""

from collections import Counter

from rlzmq import ConnectorV2, FrameStacking, PPOConfig


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
