"""Copies of episodes that learner connector pieces may change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import batch_key

__all__ = ["private_copies"]


def private_copies(episodes: Sequence[Any]) -> list[Any]:
    """Return copies of episodes that can be extended and changed without an effect on the originals.

    Arrays are shared until the first write. Further chunks of one episode get their own ids (the id followed by ``_1``,
    ``_2``, …), so that their items in the batch are kept apart.

    Args:
        episodes: SingleAgentEpisodes, MultiAgentEpisodes, batches of either, or a mixture.
    """
    num_seen: dict[Any, int] = {}
    return [
        _multi_agent_copy(episode, num_seen)
        if hasattr(episode, "agent_episodes")
        else _told_apart(single_agent_copy(episode), num_seen)
        for episode in _flat(episodes)
    ]


def _flat(episodes: Sequence[Any]) -> Iterator[Any]:
    for episode in episodes:
        if isinstance(episode, Sequence):
            yield from _flat(episode)
        else:
            yield episode


def single_agent_copy(episode: Any) -> Any:
    """Return a SingleAgentEpisode that shares its arrays with the given one until one of them is written to."""
    return episode.slice(slice(0, len(episode)))


def _told_apart(episode: Any, num_seen: dict[Any, int]) -> Any:
    key = batch_key(episode)
    index = num_seen.get(key, 0)
    num_seen[key] = index + 1
    if index:
        if episode.agent_id is not None and episode.multi_agent_episode_id is not None:
            episode.multi_agent_episode_id = f"{episode.multi_agent_episode_id}_{index}"
        else:
            episode.id_ = f"{episode.id_}_{index}"
    return episode


def _multi_agent_copy(episode: Any, num_seen: dict[Any, int]) -> Any:
    chunk = copy.copy(episode)
    chunk.agent_episodes = {
        agent_id: single_agent_copy(agent_episode)
        for agent_id, agent_episode in episode.agent_episodes.items()
    }
    index = num_seen.get(episode.id_, 0)
    num_seen[episode.id_] = index + 1
    if index:
        chunk.id_ = f"{episode.id_}_{index}"
        for agent_episode in chunk.agent_episodes.values():
            agent_episode.multi_agent_episode_id = chunk.id_
    return chunk
