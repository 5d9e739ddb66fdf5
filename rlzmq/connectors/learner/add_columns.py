"""Pieces that add the episodes' columns to the train batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rlzmq.connectors.common.frame_stacking import OBSERVATION_READERS
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.rows import TrainRows
from rlzmq.core.tree import tree_rows, tree_zeros_like
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.step_values import as_rewards

__all__ = [
    "AddColumnsFromEpisodesToTrainBatch",
    "AddInfosFromEpisodesToTrainBatch",
    "AddNextObservationsFromEpisodesToTrainBatch",
    "AddOneTsToEpisodesAndTruncate",
]


_OF_OTHER_PIECES = (Columns.OBS, Columns.STATE_OUT, Columns.STATE_IN, Columns.INFOS)


class AddColumnsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds ``actions``, ``rewards``, ``terminateds``, ``truncateds`` and all extra model outputs.

    Each column has one item per step. ``state_out`` is left to AddStatesFromEpisodesToBatch. Columns that an earlier
    piece has added are unchanged.
    """

    stage: ClassVar[int] = 2
    step_columns: ClassVar[tuple[str, ...] | None] = ()

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: A reward is not a single number.
        """
        skipped = {*batch, Columns.STATE_IN, Columns.STATE_OUT}
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if not num_steps:
                continue
            steps = slice(0, num_steps)
            if Columns.ACTIONS not in skipped:
                self.add_n_batch_items(batch, Columns.ACTIONS, episode.get_actions(steps), num_steps, episode)
            if Columns.REWARDS not in skipped:
                try:
                    rewards = as_rewards(episode.get_rewards(steps))
                except ValueError as error:
                    raise located(error, f"Episode {episode.id_!r}", Columns.REWARDS) from None
                self.add_n_batch_items(batch, Columns.REWARDS, rewards, num_steps, episode)
            for column, is_end in (
                (Columns.TERMINATEDS, episode.is_terminated),
                (Columns.TRUNCATEDS, episode.is_truncated),
            ):
                if column not in skipped:
                    ends = [False] * (num_steps - 1) + [bool(is_end)]
                    self.add_n_batch_items(batch, column, ends, num_steps, episode)
            for column in episode.extra_model_outputs:
                if column not in skipped:
                    values = episode.get_extra_model_outputs(column, steps)
                    self.add_n_batch_items(batch, column, values, num_steps, episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`. Extra rows repeat their chunk's last step, with reward 0."""
        episodes, columns = rows.episodes, rows.columns
        for name, column in episodes.columns.items():
            if name not in columns and name not in _OF_OTHER_PIECES:
                columns[name] = tree_rows(column, rows.steps)
                if name == Columns.REWARDS:
                    columns[name][rows.extra] = 0
        for name, flags in (
            (Columns.TERMINATEDS, episodes.terminated),
            (Columns.TRUNCATEDS, episodes.truncated),
        ):
            if name not in columns:
                columns[name] = rows.at_ends(flags)


class AddNextObservationsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds the observation after each step, frame-stacked if ``obs`` is."""

    stage: ClassVar[int] = 2
    step_columns: ClassVar[tuple[str, ...] | None] = (Columns.NEXT_OBS,)

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
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

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        if Columns.NEXT_OBS not in rows.columns:
            rows.columns[Columns.NEXT_OBS] = rows.observations_at(rows.steps + 1)


class AddInfosFromEpisodesToTrainBatch(ConnectorV2):
    """Adds the info dict of every step's observation. Infos are neither batched nor padded."""

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.INFOS in batch:
            return batch
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if num_steps:
                infos = list(episode.get_infos(slice(0, num_steps)))
                self.add_n_batch_items(batch, Columns.INFOS, infos, num_steps, episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        infos = rows.episodes.infos
        rows.columns[Columns.INFOS] = [infos.get(slot, {}) for slot in rows.observations.tolist()]


class AddOneTsToEpisodesAndTruncate(ConnectorV2):
    """Extends every chunk by one step, so that its final observation gets a row in the train batch.

    The extra step repeats the last observation, action and extra model outputs, with reward 0. The columns
    ``loss_mask`` (False at that step), ``terminateds`` and ``truncateds`` (True at most at the last real step) are
    added. A chunk that is not done is marked as truncated. Chunks without steps are unchanged.

    The given episodes are extended in place (ids are kept). In a LearnerConnectorPipeline these are private copies, so
    the caller's episodes do not change.
    """

    stage: ClassVar[int] = 0

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if not num_steps:
                continue
            if not episode.is_done:
                episode.is_truncated = True
            before = [False] * (num_steps - 1)
            columns = (
                (Columns.LOSS_MASK, [True] * num_steps + [False]),
                (Columns.TERMINATEDS, [*before, bool(episode.is_terminated), False]),
                (Columns.TRUNCATEDS, [*before, bool(episode.is_truncated), False]),
            )
            for column, flags in columns:
                self.add_n_batch_items(batch, column, flags, num_steps + 1, episode)
            _extend_by_one_step(episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        rows.add_one_ts()
        terminated, truncated = rows.episodes.terminated, rows.episodes.truncated
        rows.columns[Columns.LOSS_MASK] = rows.is_real
        rows.columns[Columns.TERMINATEDS] = rows.at_ends(terminated)
        rows.columns[Columns.TRUNCATEDS] = rows.at_ends(truncated | ~terminated)


def _extend_by_one_step(episode: Any) -> None:
    episode.observations.append(episode.observations.get(-1))
    episode.infos.append(episode.infos.get(-1))
    episode.actions.append(episode.actions.get(-1))
    episode.rewards.append(tree_zeros_like(episode.rewards.get(-1)) if episode.is_numpy else 0.0)
    for values in episode.extra_model_outputs.values():
        values.append(values.get(-1))
    episode.t += 1
