"""Pieces that change observations: their spaces by agent, and writing observations back into episodes."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.core.tree import is_nested, tree_stack, tree_unstack
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = [
    "OF_AGENTS",
    "AgentPiece",
    "ObservationPiece",
    "agent_space",
    "rewrite_all_observations",
    "rewrite_last_observation",
]


def agent_space(space: Any, agent_id: Any) -> Any:
    """Return the part of a Dict by agent id for one agent; the space itself in single-agent use."""
    if agent_id is not None and isinstance(space, gym.spaces.Dict) and agent_id in space.spaces:
        return space.spaces[agent_id]
    return space


OF_AGENTS = "For spaces that are Dicts by agent id, pass multi_agent=True."
"""Hint in errors about spaces."""


class AgentPiece(ConnectorV2):
    """Base class of pieces that need to know whether there are several agents.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        multi_agent: Whether the spaces are Dicts by agent id, and batches are ``{module_id: {column: …}}``.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        multi_agent: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.of_agents = multi_agent


class ObservationPiece(AgentPiece):
    """Base class of pieces that change the observation space, or each agent's. Arguments: see `AgentPiece`."""

    @abc.abstractmethod
    def new_space(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], agent_id: Hashable
    ) -> Any:
        """Return what becomes of an agent's observation space; the agent id is None in single-agent use."""

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        """Return the new space, or in multi-agent use a Dict of the agents' new spaces."""
        if not (self.of_agents and isinstance(input_observation_space, gym.spaces.Dict)):
            return self.new_space(input_observation_space, input_action_space, None)
        return gym.spaces.Dict(
            {
                agent_id: self.new_space(space, agent_space(input_action_space, agent_id), agent_id)
                for agent_id, space in input_observation_space.spaces.items()
            }
        )


def rewrite_last_observation(episode: Any, observation: Any, space: gym.Space[Any]) -> None:
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


def rewrite_all_observations(episode: Any, observations: Any, space: gym.Space[Any]) -> None:
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
