"""AddNextObservationsFromEpisodesToTrainBatch: the ``new_obs`` column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlzmq.connectors.common.frame_stacking import OBSERVATION_READERS
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.episodes.columns import Columns

__all__ = ["AddNextObservationsFromEpisodesToTrainBatch"]


class AddNextObservationsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds the observation that each step led to; frame-stacked where ``obs`` is."""

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.NEXT_OBS in batch:
            return batch
        readers = (shared_data or {}).get(OBSERVATION_READERS)
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if not num_steps:
                continue
            if readers:
                following = readers[-1].observations_of(episode, 1, num_steps + 1)
            else:
                following = episode.get_observations(slice(1, num_steps + 1))
            self.add_n_batch_items(batch, Columns.NEXT_OBS, following, num_steps, episode)
        return batch
