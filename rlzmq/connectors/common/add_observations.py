"""AddObservationsFromEpisodesToBatch: the ``obs`` column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2, batch_key
from rlzmq.episodes.columns import Columns

__all__ = ["AddObservationsFromEpisodesToBatch"]


class AddObservationsFromEpisodesToBatch(ConnectorV2):
    """Adds each episode's last observation, or on the learner those of all its steps.

    Does nothing when a piece before it has added observations already.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Add the observations of all steps (without the final one).
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self._as_learner_connector = as_learner_connector

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.OBS in batch:
            return batch
        if not self._as_learner_connector:
            items: dict[Any, list[Any]] = {}
            for episode in self.single_agent_episode_iterator(episodes):
                items.setdefault(batch_key(episode), []).append(episode.get_observations(-1))
            if items:
                batch[Columns.OBS] = items
            return batch
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if num_steps:
                observations = episode.get_observations(slice(0, num_steps))
                self.add_n_batch_items(batch, Columns.OBS, observations, num_steps, episode)
        return batch
