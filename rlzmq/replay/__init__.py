"""Columnar replay buffers and offline data, usable on their own and through the learners' batch sources.

``EpisodeReplayBuffer`` samples uniformly, ``PrioritizedEpisodeReplayBuffer`` by priorities; both store each
observation once and return samples as an `EpisodeBatch`. Their multi-agent variants have one of them per module.
``EpisodeRecorder`` joins fragments into whole episodes; ``write_shard`` writes an `EpisodeBatch` to a file, and
``open_shards`` maps such files into memory. Minari datasets can be converted in both directions.
"""

from rlzmq.replay.episode_recorder import EpisodeRecorder
from rlzmq.replay.episode_replay_buffer import EpisodeReplayBuffer
from rlzmq.replay.minari_data import export_to_minari, import_from_minari
from rlzmq.replay.multi_agent_episode_replay_buffer import (
    MultiAgentEpisodeReplayBuffer,
    MultiAgentPrioritizedEpisodeReplayBuffer,
)
from rlzmq.replay.prioritized_episode_replay_buffer import PrioritizedEpisodeReplayBuffer
from rlzmq.replay.shards import open_shards, write_shard

__all__ = [
    "EpisodeRecorder",
    "EpisodeReplayBuffer",
    "MultiAgentEpisodeReplayBuffer",
    "MultiAgentPrioritizedEpisodeReplayBuffer",
    "PrioritizedEpisodeReplayBuffer",
    "export_to_minari",
    "import_from_minari",
    "open_shards",
    "write_shard",
]
