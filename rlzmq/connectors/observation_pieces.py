"""Base classes of pieces that change observations, and writing observations back into episodes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.connectors.connector_v2 import ConnectorV2, unchanged_on_tensors
from rlzmq.core.signatures import check_takes
from rlzmq.core.tree import is_nested, tree_map, tree_stack, tree_unstack
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = [
    "AgentPiece",
    "MultiAgentObservationPreprocessor",
    "ObservationPiece",
    "SingleAgentObservationPreprocessor",
    "WriteObservationsToEpisodes",
    "agent_space",
    "rewrite_all_observations",
    "rewrite_last_observation",
]


def agent_space(space: Any, agent_id: Any) -> Any:
    """Return the part of a Dict by agent id for one agent; the space itself in single-agent use."""
    if agent_id is not None and isinstance(space, gym.spaces.Dict) and agent_id in space.spaces:
        return space.spaces[agent_id]
    return space


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


class EpisodeRows:
    """A `RowsContext` of episodes: each row is the last observation of a SingleAgentEpisode of one agent."""

    def __init__(self, episodes: Sequence[Any]) -> None:
        self._episodes = episodes
        self.num_rows: int = len(episodes)
        self.agent_id: Any = episodes[0].agent_id
        self.num_previous: Any = np.array([e.rewards.len_incl_lookback() for e in episodes], np.int64)
        self.is_first: Any = np.array([episode.t == 0 for episode in episodes], np.bool_)

    def window(self, column: str, num: int, *, current: bool) -> Any:
        """See `RowsContext.window`.

        Raises:
            KeyError: No episode has a value of the column.
        """
        end = -1 if column == Columns.OBS and not current else None
        rows = []
        for episode in self._episodes:
            columns = dict(episode.extra_model_outputs)
            columns |= {Columns.OBS: episode.observations, Columns.ACTIONS: episode.actions}
            columns[Columns.REWARDS] = episode.rewards
            buffer = columns[column]
            num_items = min(num, buffer.len_incl_lookback() + (end or 0))
            items = buffer.get(slice(-num_items + (end or 0), end)) if num_items else []
            rows.append(items if isinstance(items, list) else tree_unstack(items))
        example = next((items[0] for items in rows if items), 0.0 if column == Columns.REWARDS else None)
        if example is None:
            raise KeyError(column)
        zeros = tree_map(np.zeros_like, example)
        return tree_stack([tree_stack([zeros] * (num - len(items)) + items) for items in rows])


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

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """Write what `transform_observations` makes of the last observations into the episodes; see ConnectorV2."""
        by_agent: dict[Any, list[Any]] = {}
        for episode in self.single_agent_episode_iterator(episodes):
            by_agent.setdefault(episode.agent_id, []).append(episode)
        for agent_id, own in by_agent.items():
            observations = tree_stack([episode.get_observations(-1) for episode in own])
            transformed = self.transform_observations(observations, EpisodeRows(own))
            space = agent_space(self.observation_space, agent_id)
            for episode, observation in zip(own, tree_unstack(transformed), strict=True):
                rewrite_last_observation(episode, observation, space)
        return batch


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


class _Preprocessor(ConnectorV2):
    """Base class of pieces whose `preprocess` gets observations and the episode."""

    preprocess: Callable[..., Any]
    _takes: tuple[str, str] = ("observation", "episode")

    def check_signatures(self) -> None:
        """See ConnectorV2."""
        super().check_signatures()
        check_takes(self.preprocess, f"{type(self).__name__}.preprocess", *self._takes)

    @property
    def last_step_only(self) -> bool:
        """Whether the piece handles only the last step: True unless a subclass overrides `__call__`."""
        mine = SingleAgentObservationPreprocessor.__call__, MultiAgentObservationPreprocessor.__call__
        return type(self).__call__ in mine


class SingleAgentObservationPreprocessor(_Preprocessor):
    """Replaces every new observation in the episode with ``preprocess(observation, episode)``.

    Learners therefore see the result. If it is in another space, also override `recompute_output_observation_space`. In
    multi-agent use, `preprocess` is called per agent.

    Example::

        class Negate(SingleAgentObservationPreprocessor):
            def preprocess(self, observation, episode):
                return -observation
    """

    @abc.abstractmethod
    def preprocess(self, observation: Any, episode: Any) -> Any:
        """Return the processed observation.

        Args:
            observation: The episode's last observation.
            episode: The SingleAgentEpisode so far, including `observation`.
        """

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2. The batch is unchanged."""
        for episode in self.single_agent_episode_iterator(episodes):
            processed = self.preprocess(episode.get_observations(-1), episode)
            space = agent_space(self.observation_space, episode.agent_id)
            rewrite_last_observation(episode, processed, space)
        return batch


class MultiAgentObservationPreprocessor(_Preprocessor):
    """Replaces all agents' new observations in the episodes with ``preprocess(observations, episode)``.

    If they are in other spaces, also override `recompute_output_observation_space` (a Dict by agent id).
    """

    _takes = ("observations", "episode")

    @abc.abstractmethod
    def preprocess(self, observations: dict[Any, Any], episode: Any) -> dict[Any, Any]:
        """Return the processed observations.

        Args:
            observations: Agent id -> observation, for the agents with one at the last env step.
            episode: The MultiAgentEpisode so far.

        Returns:
            Agent id -> observation, for the same agents. Agents left out keep their observations.
        """

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2. The batch is unchanged.

        Raises:
            ValueError: `preprocess` returned an agent without an observation at this step.
        """
        for episode in episodes:
            observations = {
                agent_episode.agent_id: agent_episode.get_observations(-1)
                for agent_episode in self.single_agent_episode_iterator([episode])
            }
            for agent_id, processed in self.preprocess(dict(observations), episode).items():
                if agent_id not in observations:
                    raise ValueError(
                        f"{type(self).__name__}.preprocess: episode {episode.id_!r} has no new observation "
                        f"of agent {agent_id!r}; expected some of {sorted(map(str, observations))}."
                    )
                space = agent_space(self.observation_space, agent_id)
                rewrite_last_observation(episode.agent_episodes[agent_id], processed, space)
        return batch


class WriteObservationsToEpisodes(ConnectorV2):
    """Overwrites every episode's last observation with its item of the ``obs`` column.

    Use it after pieces that put processed observations into the batch, so that learners see them, too. The batch is
    unchanged; episodes get this piece's observation space.
    """

    last_step_only = True
    to_torch = unchanged_on_tensors

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: The batch has no ``obs`` column, or no item for one of the episodes.
        """
        if Columns.OBS not in batch:
            raise ValueError(
                f"WriteObservationsToEpisodes needs a column {Columns.OBS!r} in the batch, got columns "
                f"{sorted(batch)}. Put it after the piece that adds observations."
            )
        for episode, observation in self.single_agent_episode_iterator(
            episodes, zip_with_batch_column=batch[Columns.OBS]
        ):
            space = agent_space(self.observation_space, episode.agent_id)
            rewrite_last_observation(episode, observation, space)
        return batch
