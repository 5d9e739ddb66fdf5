"""Replay buffers and offline data on columns: usable alone, and what learners' batch sources stand on.

``EpisodeReplayBuffer`` draws uniformly, ``PrioritizedEpisodeReplayBuffer`` by priorities; both store every
observation once and give what they draw as an `EpisodeBatch`. ``write_shard`` and ``open_shards`` put an
`EpisodeBatch` into files and map them into memory.
"""

from rlzmq.replay.episode_replay_buffer import EpisodeReplayBuffer
from rlzmq.replay.prioritized_episode_replay_buffer import PrioritizedEpisodeReplayBuffer
from rlzmq.replay.shards import open_shards, write_shard

__all__ = ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer", "open_shards", "write_shard"]
