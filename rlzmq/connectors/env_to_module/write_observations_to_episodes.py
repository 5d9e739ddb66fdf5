"""WriteObservationsToEpisodes: the batch's observations become the episodes' last ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.writing import agent_space, rewrite_last_observation
from rlzmq.episodes.columns import Columns

__all__ = ["WriteObservationsToEpisodes"]


class WriteObservationsToEpisodes(ConnectorV2):
    """Overwrites every episode's last observation with its item of the ``obs`` column.

    For pieces that put processed observations into the batch, so that learners see them too. The batch stays
    as it is; episodes get this piece's observation space.
    """

    last_step_only = True

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: If the batch has no ``obs`` column, or no item for one of the episodes.
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
