"""Construction of columns from MultiAgentEpisodes."""

from __future__ import annotations

from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.agent_rows import AgentRows, track_leftovers
from rlzmq.episodes.agent_timelines import AgentTrack
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.multi_agent_columns import MultiAgentBatchColumns
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["from_episodes"]

B = TypeVar("B", bound=MultiAgentBatchColumns)


class _Group:
    """Chunks that share columns."""

    def __init__(self) -> None:
        self.saes: list[SingleAgentEpisode] = []
        self.episode: list[int] = []
        self.order: list[int] = []
        self.obs_env_ts: list[int] = []
        self.tracks: dict[int, dict[str, Any]] = {}

    def add(self, e: int, order: int, sae: SingleAgentEpisode, track: AgentTrack) -> None:
        num_steps = sae.rewards.len_incl_lookback()
        try:
            left = track_leftovers(track, num_steps)
        except ValueError as error:
            raise located(error, f"Episode {sae.id_!r}", "rewards") from None
        if left:
            self.tracks[len(self.saes)] = left
        self.saes.append(sae)
        self.episode.append(e)
        self.order.append(order)
        self.obs_env_ts += track.obs_env_ts


def from_episodes(cls: type[B], episodes: list[MultiAgentEpisode]) -> B:
    """See `MultiAgentEpisodeBatch.from_episodes`."""
    groups: dict[Any, _Group] = {}
    empty: list[tuple[Any, int, int, SingleAgentEpisode, AgentTrack]] = []
    for e, episode in enumerate(episodes):
        for order, (agent_id, sae) in enumerate(episode.agent_episodes.items()):
            track = episode._timeline.tracks[agent_id]
            kind = (sae.module_id, str(_structure(sae.observations)))
            if sae.rewards.len_incl_lookback() == 0:
                empty.append((kind, e, order, sae, track))
                continue
            outputs = sorted(
                (name, str(_structure(column))) for name, column in sae.extra_model_outputs.items()
            )
            key = (kind, str(_structure(sae.actions)), str(outputs))
            groups.setdefault(key, _Group()).add(e, order, sae, track)
    by_kind = {key[0]: group for key, group in groups.items()}
    for kind, e, order, sae, track in empty:  # without steps, it fits any columns of its module
        group = by_kind.get(kind)
        if group is None:
            group = by_kind[kind] = groups[kind] = _Group()
        group.add(e, order, sae, track)
    left = {e: _episode_leftovers(episode) for e, episode in enumerate(episodes)}
    first = episodes[0] if episodes else None
    return cls(
        [
            AgentRows(EpisodeBatch.from_episodes(g.saes), g.episode, g.order, g.obs_env_ts, g.tracks)
            for g in groups.values()
        ],
        episode_ids=[episode.id_ for episode in episodes],
        env_t_started=[episode.env_t_started for episode in episodes],
        env_t=[episode.env_t for episode in episodes],
        lookback=[episode.len_lookback_buffer for episode in episodes],
        terminated=[episode.is_terminated for episode in episodes],
        truncated=[episode.is_truncated for episode in episodes],
        leftovers={e: data for e, data in left.items() if data},
        observation_space=_observation_spaces(episodes),
        action_space=first.action_space if first else None,
        agent_to_module_mapping_fn=first.agent_to_module_mapping_fn if first else None,
    )


def _observation_spaces(episodes: list[MultiAgentEpisode]) -> Any:
    """Return the observation spaces by agent id, including those changed by connector pieces."""
    if not episodes:
        return None
    spaces = episodes[0].observation_space
    own = {
        agent_id: sae.observation_space
        for episode in episodes
        for agent_id, sae in episode.agent_episodes.items()
        if sae.observation_space is not None and sae.observation_space is not spaces.get(agent_id)
    }
    if not own:
        return spaces
    merged = {**dict(spaces), **own}
    return gym.spaces.Dict(merged) if isinstance(spaces, gym.spaces.Dict) else merged


def _structure(buffer: Any) -> Any:
    """Return the shapes and kinds of one item of a column, without its number of items."""
    if not buffer.len_incl_lookback():
        return None
    item = buffer.get(-buffer.lookback if buffer.lookback else 0, neg_index_as_lookback=True)
    return _keys(item), _signature(item)


def _keys(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _keys(item[key]) for key in sorted(item, key=str)}
    if isinstance(item, tuple):
        return tuple(_keys(part) for part in item)
    return None


def _signature(tree: Any) -> tuple[Any, ...]:
    """Return the shapes and kinds of a tree's leaves. Items with equal signatures can be stacked into one column."""
    return tuple((np.shape(leaf), np.asarray(leaf).dtype.str) for leaf in tree_leaves(tree))


def _episode_leftovers(episode: MultiAgentEpisode) -> dict[str, Any]:
    """Return the data of an episode that is not in the tables."""
    timeline = episode._timeline
    left: dict[str, Any] = {}
    values: dict[str, Any] = {
        "departed": dict(timeline.departed),
        "early_rewards": dict(timeline.early_rewards),
        "custom_data": dict(episode.custom_data),
        "agent_module_ids": {
            agent_id: module_id
            for agent_id, module_id in episode._agent_module_ids.items()
            if agent_id not in episode.agent_episodes
        },
        "duration_s": episode.get_duration_s(),
    }
    left.update((name, value) for name, value in values.items() if value)
    return left
