"""Episodes: hand-made ones, getters, slices, cut, look-back buffers."""

import copy

import gymnasium as gym
import numpy as np

from rlzmq import AlgorithmConfig, SingleAgentEpisode

episode = SingleAgentEpisode()
assert len(episode) == 0
episode.add_env_reset(observation="obs_0", infos="info_0")
assert len(episode) == 0
for i in range(5):
    episode.add_env_step(
        observation=f"obs_{i + 1}",
        action=f"act_{i}",
        reward=f"rew_{i}",
        terminated=False,
        truncated=False,
        infos=f"info_{i + 1}",
    )
assert len(episode) == 5

assert episode.get_observations(0) == "obs_0"
assert episode.observations[0] == "obs_0"
assert episode.get_observations([1, 2]) == ["obs_1", "obs_2"]
assert episode.get_observations(slice(1, 3)) == ["obs_1", "obs_2"]
assert episode.get_rewards(-1) == episode.rewards[-1] == "rew_4"
assert episode.get_actions(0) == episode.actions[0] == "act_0"
sliced_episode = episode[3:4]
assert list(sliced_episode.observations) == ["obs_3", "obs_4"]
assert list(sliced_episode.actions) == ["act_3"]
assert list(sliced_episode.rewards) == ["rew_3"]

of_arrays = copy.deepcopy(episode)
assert of_arrays.is_numpy is False
of_arrays.to_numpy()
assert of_arrays.is_numpy is True

assert episode.is_done is False
continuation_episode = episode.cut()
assert len(episode) == 5
assert len(continuation_episode) == 0
assert continuation_episode.get_observations(-1) == "obs_5"

AlgorithmConfig().env_runners(episode_lookback_horizon=10)

episode = SingleAgentEpisode(
    observations=["o0", "o1", "o2", "o3"],
    actions=["a0", "a1", "a2"],
    rewards=[0.0, 1.0, 2.0],
    len_lookback_buffer=3,
)
assert len(episode) == 0
try:
    episode.get_rewards(0)
except IndexError:
    pass
else:
    raise AssertionError("there is no reward 0")
assert list(episode.get_rewards(slice(-3, None))) == [0.0, 1.0, 2.0]
assert list(episode.get_rewards(slice(-5, None), fill=0.0)) == [0.0, 0.0, 0.0, 1.0, 2.0]

episode = SingleAgentEpisode(
    observations=["o-3", "o-2", "o-1", "o0", "o1", "o2", "o3"],
    actions=["a-3", "a-2", "a-1", "a0", "a1", "a2"],
    rewards=[-3.0, -2.0, -1.0, 0.0, 1.0, 2.0],
    len_lookback_buffer=3,
)
assert len(episode) == 3
windows = [
    list(episode.get_rewards(slice(t - 2, t + 1), neg_index_as_lookback=True)) for t in range(len(episode))
]
assert windows == [[-2.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 1.0, 2.0]]
assert list(episode.get_rewards(slice(-4, 0), neg_index_as_lookback=True, fill=0.0)) == [
    0.0,
    -3.0,
    -2.0,
    -1.0,
]

episode = SingleAgentEpisode(
    action_space=gym.spaces.Dict(
        {
            "a": gym.spaces.Discrete(3),
            "b": gym.spaces.MultiDiscrete([2, 3]),
            "c": gym.spaces.Box(-1.0, 1.0, (2,)),
        }
    )
)
episode.add_env_reset(observation=0)
episode.add_env_step(
    observation=1,
    action={"a": 0, "b": np.array([1, 2]), "c": np.array([0.5, -0.5], np.float32)},
    reward=1.0,
)
for t in range(len(episode)):
    previous = episode.get_actions(
        indices=slice(t - 4, t), neg_index_as_lookback=True, fill=0.0, one_hot_discrete=True
    )
    assert len(previous) == 4
    assert [len(action["b"]) for action in previous] == [5, 5, 5, 5]
