"""AddColumnsFromEpisodesToTrainBatch: actions, rewards, ends and extra model outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.rewards import as_rewards

__all__ = ["AddColumnsFromEpisodesToTrainBatch"]


class AddColumnsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds ``actions``, ``rewards``, ``terminateds``, ``truncateds`` and all extra model outputs.

    One item per step; ``state_out`` is left to AddStatesFromEpisodesToBatch. Columns that a piece before it
    has added already are left alone.
    """

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: If a reward is not one number.
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
