"""AddObservationsFromEpisodesToBatch: adds the ``obs`` column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2, batch_key
from rlzmq.connectors.torch_piece import TorchPiece
from rlzmq.episodes.columns import Columns

__all__ = ["AddObservationsFromEpisodesToBatch", "add_observations_of_steps", "drop_observations_of_steps"]


class _OfSteps(dict[Any, list[Any]]):
    """An ``obs`` column read from the episodes. It is rebuilt when later pieces change their observations."""

    def __init__(self) -> None:
        super().__init__()
        self.first_items: dict[Any, list[Any]] = {}

    def is_untouched(self) -> bool:
        """Return whether no piece has changed the column's items."""
        first = self.first_items
        return self.keys() == first.keys() and all(
            len(items) == len(first[key]) and all(map(is_, items, first[key])) for key, items in self.items()
        )


def add_observations_of_steps(batch: dict[str, Any], episodes: Iterable[Any]) -> None:
    """Fill the ``obs`` column with the observations of all steps of SingleAgentEpisodes."""
    batch[Columns.OBS] = column = _OfSteps()
    for episode in episodes:
        num_steps = len(episode)
        if num_steps:
            observations = episode.get_observations(slice(0, num_steps))
            ConnectorV2.add_n_batch_items(batch, Columns.OBS, observations, num_steps, episode)
    column.first_items = {key: list(items) for key, items in column.items()}
    if not column:
        del batch[Columns.OBS]


def drop_observations_of_steps(batch: dict[str, Any]) -> None:
    """Remove the ``obs`` column if `add_observations_of_steps` added it, so that it can be rebuilt."""
    column = batch.get(Columns.OBS)
    if isinstance(column, _OfSteps) and column.is_untouched():
        del batch[Columns.OBS]


class AddObservationsFromEpisodesToBatch(ConnectorV2):
    """Adds each episode's last observation, or on the learner the observations of all its steps.

    Does nothing if an earlier piece has added observations.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether to add the observations of all steps (without the final one).
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

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2."""
        if self._as_learner_connector:
            drop_observations_of_steps(batch)
        if Columns.OBS in batch:
            return batch
        if not self._as_learner_connector:
            items: dict[Any, list[Any]] = {}
            for episode in self.single_agent_episode_iterator(episodes):
                items.setdefault(batch_key(episode), []).append(episode.get_observations(-1))
            if items:
                batch[Columns.OBS] = items
            return batch
        add_observations_of_steps(
            batch, self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False)
        )
        return batch

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        """See ConnectorV2. Tensors have this layout already."""
        return TorchPiece()
