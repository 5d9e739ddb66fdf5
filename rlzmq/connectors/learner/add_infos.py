"""AddInfosFromEpisodesToTrainBatch: the ``infos`` column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.episodes.columns import Columns

__all__ = ["AddInfosFromEpisodesToTrainBatch"]


class AddInfosFromEpisodesToTrainBatch(ConnectorV2):
    """Adds the info dict of every step's observation. Infos are neither batched nor padded."""

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.INFOS in batch:
            return batch
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if num_steps:
                infos = list(episode.get_infos(slice(0, num_steps)))
                self.add_n_batch_items(batch, Columns.INFOS, infos, num_steps, episode)
        return batch
