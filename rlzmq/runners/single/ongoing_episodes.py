"""OngoingEpisodes: totals of each environment's unfinished episode between two fragments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.runners.episode_metrics import FinishedEpisodes
from rlzmq.runners.single.fragment_columns import ChunkTable

__all__ = ["OngoingEpisodes"]


class OngoingEpisodes:
    """Ids, steps, returns and start times of each env's current episode.

    Args:
        num_envs: Number of environments; a new episode begins in each one.
        new_id: Creates episode ids.

    Attributes:
        ids: Episode id per env.
        steps: int64[N], number of env steps so far.
        returns: float64[N], sum of rewards so far.
        started_s: float64[N], start time on the clock of ``time.perf_counter``.
    """

    def __init__(self, num_envs: int, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.ids: list[str] = [new_id() for _ in range(num_envs)]
        self.steps: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.returns: NDArray[np.float64] = np.zeros(num_envs, np.float64)
        self.started_s: NDArray[Any] = np.full(num_envs, time.perf_counter())

    @classmethod
    def from_state(cls, state: Mapping[str, Any], new_id: Callable[[], str]) -> OngoingEpisodes:
        """Create from a state of `get_state`. The time in between is not counted."""
        ongoing = cls(0, new_id)
        ongoing.ids = [str(episode_id) for episode_id in state["ids"]]
        ongoing.steps = np.array(state["steps"], np.int64)
        ongoing.returns = np.array(state["returns"], np.float64)
        ongoing.started_s = time.perf_counter() - np.array(state["ages_s"], np.float64)
        return ongoing

    def get_state(self) -> dict[str, Any]:
        """Return plain values and arrays."""
        return {
            "ids": list(self.ids),
            "steps": self.steps.copy(),
            "returns": self.returns.copy(),
            "ages_s": time.perf_counter() - self.started_s,
        }

    def begin_anew(self, index: int) -> None:
        """Discard the episode of env ``index`` without counting it, and begin another."""
        self.ids[index] = self._new_id()
        self.steps[index] = 0
        self.returns[index] = 0.0

    def close(self, index: int, finished: FinishedEpisodes) -> None:
        """End the episode of env ``index`` between two fragments; its chunks have been returned already."""
        if self.steps[index]:
            finished.returns.append(float(self.returns[index]))
            finished.lengths.append(int(self.steps[index]))
            finished.durations_s.append(time.perf_counter() - float(self.started_s[index]))
        self.steps[index] = 0

    def settle(
        self,
        table: ChunkTable,
        chunk_returns: NDArray[np.float64],
        begin_s: float,
        num_steps: int,
        finished: FinishedEpisodes,
    ) -> list[str]:
        """Add a fragment's chunks.

        Args:
            table: The chunks.
            chunk_returns: float64[C].
            begin_s: Start time of the fragment.
            num_steps: The fragment's number of vector steps.
            finished: Receives the ended episodes.

        Returns:
            The episode id of each chunk.
        """
        if not table.num_finished and len(table.env_index) == len(self.ids) and table.continues.all():
            self.steps += table.length
            self.returns += chunk_returns
            return list(self.ids)
        end_s = time.perf_counter()
        step_s = (end_s - begin_s) / max(num_steps, 1)
        env, continues, num = table.env_index, table.continues, table.num_finished
        total_returns = chunk_returns + np.where(continues, self.returns[env], 0.0)
        total_steps = table.length + np.where(continues, self.steps[env], 0)
        started_s = np.where(continues, self.started_s[env], begin_s + step_s * table.first_step)

        ended_s = begin_s + step_s * (table.first_step[:num] + table.length[:num])
        finished.returns += total_returns[:num].tolist()
        finished.lengths += total_steps[:num].tolist()
        finished.durations_s += (ended_s - started_s[:num]).tolist()

        ids = [
            self.ids[index] if goes_on else self._new_id()
            for index, goes_on in zip(env.tolist(), continues.tolist(), strict=True)
        ]
        self.steps[:] = 0
        self.returns[:] = 0.0
        self.started_s[:] = end_s
        open_envs = env[num:]
        self.steps[open_envs] = total_steps[num:]
        self.returns[open_envs] = total_returns[num:]
        self.started_s[open_envs] = started_s[num:]
        open_ids = dict(zip(open_envs.tolist(), ids[num:], strict=True))
        self.ids = [open_ids.get(index) or self._new_id() for index in range(len(self.ids))]
        return ids
