"""ComputeReturnsToGo: the discounted sum of the rewards from each step on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.learner.gae import discounted_suffix_sums
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["ComputeReturnsToGo"]


class ComputeReturnsToGo(ConnectorV2):
    """Adds ``returns_to_go``: ``r[t] + gamma * r[t + 1] + …`` up to the chunk's end, float32.

    There is no bootstrapping: give it whole episodes (``batch_mode="complete_episodes"``) unless you mean to
    stop at chunk ends.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        gamma: Discount factor in [0, 1].
    """

    columnar: ClassVar[bool] = True

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        gamma: float,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.RETURNS_TO_GO in batch:
            return batch
        kept = [
            episode
            for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False)
            if len(episode)
        ]
        if not kept:
            return batch
        lengths = [len(episode) for episode in kept]
        rewards = np.concatenate([np.asarray(episode.get_rewards(), np.float64) for episode in kept])
        returns = self._returns(rewards, lengths)
        for episode, part in zip(kept, np.split(returns, np.cumsum(lengths)[:-1]), strict=True):
            self.add_n_batch_items(batch, Columns.RETURNS_TO_GO, part, len(part), episode)
        return batch

    def compute_columns(self, episodes: EpisodeBatch) -> dict[str, Any]:
        """Columnar form of `__call__`."""
        rewards = np.asarray(episodes.columns[Columns.REWARDS][episodes.step_slots()], np.float64)
        return {Columns.RETURNS_TO_GO: self._returns(rewards, episodes.length)}

    def _returns(self, rewards: npt.NDArray[np.float64], lengths: Any) -> npt.NDArray[np.float32]:
        lengths = np.asarray(lengths, np.int64)
        ends = np.cumsum(lengths)[lengths > 0] - 1
        return discounted_suffix_sums(rewards, ends, self.gamma).astype(np.float32)

    def __repr__(self) -> str:
        return f"ComputeReturnsToGo(gamma={self.gamma})"
