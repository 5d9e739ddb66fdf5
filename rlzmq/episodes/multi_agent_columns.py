"""MultiAgentBatchColumns: the columns and tables of a `MultiAgentEpisodeBatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.episodes.agent_rows import AgentRows
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_list import EpisodeList
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode

__all__ = ["EPISODE_TABLE", "IntArray", "MultiAgentBatchColumns"]

IntArray = NDArray[np.int64]

EPISODE_TABLE = ("env_t_started", "env_t", "lookback", "terminated", "truncated", "env_index")


class MultiAgentBatchColumns(EpisodeList[MultiAgentEpisode]):
    """Data of a `MultiAgentEpisodeBatch`, whose docstring documents the arguments."""

    def __init__(
        self,
        rows: Sequence[AgentRows],
        *,
        episode_ids: list[str],
        env_t_started: Any,
        env_t: Any,
        lookback: Any,
        terminated: Any,
        truncated: Any,
        env_index: Any = None,
        leftovers: dict[int, dict[str, Any]] | None = None,
        observation_space: Any = None,
        action_space: Any = None,
        agent_to_module_mapping_fn: Callable[..., str] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.rows: list[AgentRows] = list(rows)
        self.episode_ids = episode_ids
        num = len(episode_ids)
        self.env_t_started: IntArray = np.asarray(env_t_started, np.int64)
        self.env_t: IntArray = np.asarray(env_t, np.int64)
        self.lookback: IntArray = np.asarray(lookback, np.int64)
        self.terminated: NDArray[np.bool_] = np.asarray(terminated, np.bool_)
        self.truncated: NDArray[np.bool_] = np.asarray(truncated, np.bool_)
        self.env_index: IntArray = np.asarray([-1] * num if env_index is None else env_index, np.int64)
        self.leftovers: dict[int, dict[str, Any]] = {} if leftovers is None else leftovers
        self.observation_space = observation_space
        self.action_space = action_space
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn
        self.meta: dict[str, Any] = {} if meta is None else meta
        self._is_ordinary = False
        self._tracked: dict[int, MultiAgentEpisode] = {}
        for name in EPISODE_TABLE:
            if len(getattr(self, name)) != num:
                raise ValueError(
                    f"MultiAgentEpisodeBatch.{name}: expected {num} values, one per episode, got "
                    f"{len(getattr(self, name))}."
                )

    # -- facts --------------------------------------------------------------------------------------

    def _num_chunks(self) -> int:
        return len(self.episode_ids)

    @property
    def num_env_steps(self) -> int:
        """Number of env steps in all chunks, without lookback."""
        if self._is_ordinary:
            return sum(map(len, self))
        return int((self.env_t - self.env_t_started).sum())

    @property
    def num_agent_steps(self) -> int:
        """Number of the agents' completed steps, without lookback."""
        if self._is_ordinary:
            return sum(episode.agent_steps() for episode in self)
        return sum(rows.batch.num_env_steps for rows in self.rows)

    @property
    def agent_batches(self) -> list[EpisodeBatch]:
        """The agents' chunks, one batch per group of equal structure."""
        return [rows.batch for rows in self.rows]

    @property
    def module_ids(self) -> list[str]:
        """Ids of the modules with steps in this batch, sorted."""
        ids: set[str] = set()
        for batch in self.agent_batches:
            if batch.module_ids is not None:
                ids.update(
                    mid for mid, num in zip(batch.module_ids, batch.length.tolist(), strict=True) if num
                )
        return sorted(ids)

    def batches_of(self, module_id: str) -> list[EpisodeBatch]:
        """Return the chunks (with at least one step) of a module's agents."""
        found = []
        for batch in self.agent_batches:
            mask = np.array([mid == module_id for mid in batch.module_ids or ()], np.bool_) & (
                batch.length > 0
            )
            if mask.all() and len(mask):
                found.append(batch)
            elif mask.any():
                found.append(batch.select(mask))
        return found

    def agent_steps_by(self, which: str) -> dict[Any, int]:
        """Return completed steps by agent id (``which="agent_ids"``) or module id (``"module_ids"``)."""
        counts: dict[Any, int] = {}
        for batch in self.agent_batches:
            for key, num in zip(getattr(batch, which) or (), batch.length.tolist(), strict=True):
                if num:
                    counts[key] = counts.get(key, 0) + num
        return counts

    def get_returns(self) -> NDArray[np.float64]:
        """Return the sum of all agents' rewards of completed steps, without lookback, float64[E]."""
        if (updated := self.updated()) is not self:
            return updated.get_returns()
        returns = np.zeros(len(self), np.float64)
        for rows in self.rows:
            np.add.at(returns, rows.episode, rows.batch.get_returns())
        return returns

    def __repr__(self) -> str:
        return (
            f"MultiAgentEpisodeBatch(chunks={len(self)}, env_steps={self.num_env_steps}, "
            f"agent_steps={self.num_agent_steps}, modules={self.module_ids})"
        )

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tracked"}
