"""ObservedRows: the view that columnar connector pieces have of agents' latest observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.connectors.columnar import window_mask
from rlzmq.core.tree import space_filler, tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.runners.multi.module_rows import ModuleStore
from rlzmq.runners.multi.ongoing_episodes import AgentRecord

__all__ = ["ObservedRows"]

IntArray = NDArray[np.int64]


class ObservedRows:
    """A `RowsContext`: agents' latest observations in several environments.

    Args:
        agent_id: The agent; None: several agents.
        records: The agents' chunks, row by row.
        action_space: Theirs; gives form to the actions before the first one.

    Attributes:
        num_rows, is_first, num_previous, agent_id: See `RowsContext`.
        records: As given.
    """

    def __init__(self, agent_id: Any, records: Sequence[AgentRecord], action_space: Any) -> None:
        self.agent_id = agent_id
        self.records = records
        self.num_rows = len(records)
        self.num_previous: IntArray = np.array([len(record.act_rows) for record in records], np.int64)
        self.is_first = np.array([record.t_started + record.num_steps == 0 for record in records], np.bool_)
        self._action_space = action_space

    def window(self, column: str, num: int, *, current: bool) -> Any:
        """See `RowsContext.window`.

        Raises:
            ValueError: A window of steps that should end with the current, unfinished one.
            KeyError: No module has given the column yet.
        """
        if current and column != Columns.OBS:
            raise ValueError(
                f"window({column!r}, current=True): the step at an agent's latest observation "
                "is not made yet. Pass current=False."
            )
        if column == Columns.REWARDS:
            return self._rewards(num)
        missing = window_mask(self.num_previous, num, current=current)
        rows = np.zeros((self.num_rows, num), np.int64)
        for own, record in zip(rows, self.records, strict=True):
            listed = record.act_rows
            if column == Columns.OBS:
                listed = record.observation_rows[: len(listed) + current]
            latest = listed[-num:]
            own[num - len(latest) :] = latest
        values = self._take(column, rows)
        if missing is not None:
            tree_map(lambda leaf: leaf.__setitem__(missing, 0), values)
        return values

    def _rewards(self, num: int) -> NDArray[np.float64]:
        rewards = np.zeros((self.num_rows, num))
        for own, record in zip(rewards, self.records, strict=True):
            latest = record.rewards[-num:]
            own[num - len(latest) :] = latest
        return rewards

    def _take(self, column: str, rows: IntArray) -> Any:
        """Return a column's values in the given rows ``[N, num]`` of the records' stores."""
        by_store: dict[int, list[int]] = {}
        for n, record in enumerate(self.records):
            by_store.setdefault(id(record.store), []).append(n)
        parts, places = [], []
        for own in by_store.values():
            part = _column(self.records[own[0]].store, column, rows[own])
            if part is not None:
                parts.append(part)
                places.append(own)
        if not parts:
            if column != Columns.ACTIONS or self._action_space is None:
                raise KeyError(column)
            return space_filler(self._action_space, 0, lead=rows.shape)
        if len(by_store) == 1:
            return parts[0]

        def joined(*leaves: NDArray[Any]) -> NDArray[Any]:
            dtype = np.result_type(*leaves)
            whole = np.zeros((*rows.shape, *leaves[0].shape[2:]), dtype)
            for own, leaf in zip(places, leaves, strict=True):
                whole[own] = leaf
            return whole

        return tree_map(joined, *parts)


def _column(store: ModuleStore, column: str, rows: IntArray) -> Any:
    if column == Columns.OBS:
        return store.observations(rows) if store.num_observations else None
    return store.act_column(column, rows)
