"""Columnar replay buffers and offline data, usable alone and by the learners' batch sources.

``EpisodeReplayBuffer`` samples uniformly, ``PrioritizedEpisodeReplayBuffer`` by priorities; both store each
observation once and return samples as an `EpisodeBatch`. ``write_shard`` writes an `EpisodeBatch` to files, and
``open_shards`` maps them into memory.
"""

from rlzmq.replay.episode_replay_buffer import EpisodeReplayBuffer
from rlzmq.replay.prioritized_episode_replay_buffer import PrioritizedEpisodeReplayBuffer
from rlzmq.replay.shards import open_shards, write_shard

__all__ = ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer", "open_shards", "write_shard"]
