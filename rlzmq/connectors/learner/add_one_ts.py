"""AddOneTsToEpisodesAndTruncate: one more, masked step per chunk, to bootstrap from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.core.tree import tree_zeros_like
from rlzmq.episodes.columns import Columns

__all__ = ["AddOneTsToEpisodesAndTruncate"]


class AddOneTsToEpisodesAndTruncate(ConnectorV2):
    """Makes every chunk one step longer, so that its final observation gets a row in the train batch.

    The extra step repeats the last observation, action and extra model outputs, with reward 0. The columns
    ``loss_mask`` (False there), ``terminateds`` and ``truncateds`` (True at most at the last real step) are
    added; a chunk that is not done is marked as truncated. Chunks without steps are left alone.

    The given episodes are extended in place (ids are kept); within a LearnerConnectorPipeline these are
    private copies, the caller's episodes stay as they are.
    """

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
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


def _extend_by_one_step(episode: Any) -> None:
    episode.observations.append(episode.observations.get(-1))
    episode.infos.append(episode.infos.get(-1))
    episode.actions.append(episode.actions.get(-1))
    episode.rewards.append(tree_zeros_like(episode.rewards.get(-1)) if episode.is_numpy else 0.0)
    for values in episode.extra_model_outputs.values():
        values.append(values.get(-1))
    episode.t += 1
