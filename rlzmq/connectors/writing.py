"""Functions that write processed observations back into episodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import is_nested, tree_stack, tree_unstack
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["agent_space", "rewrite_all_observations", "rewrite_last_observation"]


def agent_space(space: Any, agent_id: Any) -> Any:
    """Return the part of a Dict by agent id for one agent; the space itself in single-agent use."""
    if agent_id is not None and isinstance(space, gym.spaces.Dict) and agent_id in space.spaces:
        return space.spaces[agent_id]
    return space


def map_agent_spaces(
    space: Any, func: Any, multi_agent: bool, agent_ids: Collection[Any] | None = None
) -> Any:
    """Return `func` of the space, or in multi-agent use of every (listed) agent's part of it."""
    if multi_agent and isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict(
            {
                agent_id: func(part) if agent_ids is None or agent_id in agent_ids else part
                for agent_id, part in space.spaces.items()
            }
        )
    return func(space)


def rewrite_last_observation(episode: Any, observation: Any, space: Any) -> None:
    """Replace the last observation, and the episode's observation space if a space is given.

    Observations of array-backed episodes become a list if the older ones have another shape or dtype.
    """
    if space is not None and episode.observation_space is not space:
        episode.observation_space = space
    buffer = episode.observations
    if buffer.finalized and not _fits(buffer.data, observation):
        items: Any = [*tree_unstack(buffer.data)[:-1], observation]
        if len(items) == 1:
            items = tree_stack(items)
        episode.observations = InfiniteLookbackBuffer(items, buffer.lookback, episode.observation_space)
        return
    episode.set_observations(new_data=observation, at_indices=-1)


def rewrite_all_observations(episode: Any, observations: Any, space: Any) -> None:
    """Replace all observations, including the lookback, with a list or a tree of arrays with as many items."""
    episode.observations = InfiniteLookbackBuffer(observations, episode.observations.lookback, space)
    if space is not None:
        episode.observation_space = space


def _fits(column: Any, observation: Any) -> bool:
    if is_nested(column) or is_nested(observation):
        if type(column) is not type(observation) or len(column) != len(observation):
            return False
        keys = column if isinstance(column, dict) else range(len(column))
        if isinstance(column, dict) and column.keys() != observation.keys():
            return False
        return all(_fits(column[key], observation[key]) for key in keys)
    array = np.asarray(observation)
    return bool(column.shape[1:] == array.shape and column.dtype == array.dtype)
