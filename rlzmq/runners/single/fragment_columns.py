"""Columns of one fragment, filled once per vector step, and the episode chunks found in them.

A fragment's columns are env-major, ``[num_envs, num_slots, ...]`` with ``num_slots = lookback + T + 1``.
Slot ``lookback`` holds the observations at the fragment's begin; the slots before it are the last ``lookback`` slots of
the previous fragment. The step at slot s leads to the observation at s + 1. An autoreset step is a slot between two
chunks that belongs to neither. Between two fragments, `OngoingEpisodes` holds the totals of unfinished episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.runners.episode_metrics import FinishedEpisodes

__all__ = ["ChunkTable", "ColumnBlock", "OngoingEpisodes", "find_chunks"]

Writer = Callable[[int, Any], None]


class ColumnBlock:
    """Columns by name, each a tree of arrays ``[num_envs, num_slots, ...]``.

    Args:
        num_envs: Rows.
        num_slots: Slots per row; ``grow`` adds more.
        columns: Columns of this size; None: there are none yet.
    """

    def __init__(self, num_envs: int, num_slots: int, columns: dict[str, Any] | None = None) -> None:
        self.num_envs = num_envs
        self.num_slots: int = num_slots
        self.columns: dict[str, Any] = {} if columns is None else columns
        self._writers: dict[str, Writer] = {}

    def add(self, name: str, example: Any, dtype: Any = None) -> None:
        """Add a column of zeros.

        Args:
            name: The column's name.
            example: A tree of arrays ``[num_envs, ...]`` with the column's shapes and dtypes.
            dtype: Overrides the dtype.
        """
        lead = (self.num_envs, self.num_slots)
        self._writers.pop(name, None)
        self.columns[name] = tree_map(
            lambda leaf: np.zeros((*lead, *leaf.shape[1:]), leaf.dtype if dtype is None else dtype), example
        )

    def cast_like(self, name: str, example: Any) -> None:
        """Change the dtypes of a column to those of a tree of arrays."""
        self._writers.pop(name, None)
        self.columns[name] = tree_map(
            lambda column, leaf: column if column.dtype == leaf.dtype else column.astype(leaf.dtype),
            self.columns[name],
            example,
        )

    def writer(self, name: str) -> Writer:
        """Return ``write(slot, values)`` for values ``[num_envs, ...]``; valid until the block grows."""
        writer = self._writers.get(name)
        if writer is None:
            writer = self._writers[name] = self._make_writer(self.columns[name])
        return writer

    def _make_writer(self, column: Any) -> Writer:
        if isinstance(column, np.ndarray):
            write: Writer = column.swapaxes(0, 1).__setitem__
            return write

        rows = [leaf.swapaxes(0, 1) for leaf in tree_leaves(column)]

        def write_tree(slot: int, values: Any) -> None:
            for row, value in zip(rows, tree_leaves(values), strict=True):
                row[slot] = value

        return write_tree

    def grow(self, num_slots: int) -> None:
        """Make room for ``num_slots`` slots and keep the written values."""
        old = self.num_slots
        if num_slots <= old:
            return

        def grown(leaf: NDArray[Any]) -> NDArray[Any]:
            larger = np.zeros((leaf.shape[0], num_slots, *leaf.shape[2:]), leaf.dtype)
            larger[:, :old] = leaf
            return larger

        self.columns = {name: tree_map(grown, column) for name, column in self.columns.items()}
        self._writers.clear()
        self.num_slots = num_slots

    def copy_slots(self, begin: int, end: int) -> ColumnBlock:
        """Return a block with copies of the slots ``begin … end - 1``."""
        columns = {
            name: column[:, begin:end].copy()
            if type(column) is np.ndarray
            else tree_map(lambda leaf: leaf[:, begin:end].copy(), column)
            for name, column in self.columns.items()
        }
        return ColumnBlock(self.num_envs, end - begin, columns)

    def put(self, block: ColumnBlock) -> None:
        """Write another block's slots into the first ones, adding columns that are missing."""
        for name, column in block.columns.items():
            if name not in self.columns:
                self.add(name, tree_map(lambda leaf: leaf[:, 0], column))
            for to, leaf in zip(tree_leaves(self.columns[name]), tree_leaves(column), strict=True):
                to[:, : leaf.shape[1]] = leaf

    def flat(self) -> dict[str, Any]:
        """Return the columns as ``[num_envs * num_slots, ...]`` (views)."""
        return {
            name: column.reshape(-1, *column.shape[2:])
            if type(column) is np.ndarray
            else tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), column)
            for name, column in self.columns.items()
        }


@dataclass
class ChunkTable:
    """Positions of a fragment's chunks: finished ones by (step, env), then ongoing ones by env.

    Attributes:
        env_index: int64[C].
        first_step: int64[C], first step, counted from the fragment's begin.
        length: int64[C], number of steps.
        terminated, truncated: bool[C].
        continues: bool[C], whether the chunk's episode began before the fragment.
        num_finished: Number of chunks that ended their episode.
    """

    env_index: NDArray[np.int64]
    first_step: NDArray[np.int64]
    length: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    continues: NDArray[np.bool_]
    num_finished: int

    def select(self, mask: NDArray[np.bool_]) -> ChunkTable:
        """Return the chunks where ``mask`` is True."""
        return ChunkTable(
            self.env_index[mask],
            self.first_step[mask],
            self.length[mask],
            self.terminated[mask],
            self.truncated[mask],
            self.continues[mask],
            int(mask[: self.num_finished].sum()),
        )


def find_chunks(
    terminated: NDArray[np.bool_], truncated: NDArray[np.bool_], starts_with_reset: NDArray[np.bool_]
) -> ChunkTable:
    """Find the chunks from the done flags of a fragment.

    Args:
        terminated, truncated: bool ``[T, num_envs]``, the flags of each vector step; False at
            autoreset steps.
        starts_with_reset: bool ``[num_envs]``, envs whose step 0 is an autoreset step.

    Returns:
        The chunks with at least one step.
    """
    num_steps, num_envs = terminated.shape
    done = terminated | truncated
    if not done.any():
        none = np.zeros(num_envs, np.bool_)
        begin = starts_with_reset.astype(np.int64)
        table = ChunkTable(np.arange(num_envs), begin, num_steps - begin, none, none, ~starts_with_reset, 0)
        return table if num_steps > 1 or not begin.any() else table.select(table.length > 0)
    # (step, env) of every episode end, sorted by step, then env
    end_step, end_env = np.nonzero(done)
    # The same, sorted by env, then step, so that consecutive ends of one env are neighbors.
    by_env = np.lexsort((end_step, end_env))
    env, step = end_env[by_env], end_step[by_env]
    begin = np.empty_like(step)
    is_first = np.ones(len(env), np.bool_)
    if len(env):
        is_first[1:] = env[1:] != env[:-1]
        begin[1:] = step[:-1] + 2  # the end, the autoreset step, then the next episode's first step
        begin[is_first] = starts_with_reset[env[is_first]]
    begins, firsts = np.empty_like(begin), np.empty_like(is_first)
    begins[by_env], firsts[by_env] = begin, is_first
    continues = firsts & ~starts_with_reset[end_env]

    open_begin = starts_with_reset.astype(np.int64)
    open_continues = ~starts_with_reset
    np.maximum.at(open_begin, end_env, end_step + 2)
    open_continues[end_env] = False

    table = ChunkTable(
        env_index=np.concatenate([end_env, np.arange(num_envs)]),
        first_step=np.concatenate([begins, open_begin]),
        length=np.concatenate([end_step + 1 - begins, num_steps - open_begin]),
        terminated=np.concatenate([terminated[end_step, end_env], np.zeros(num_envs, np.bool_)]),
        truncated=np.concatenate([truncated[end_step, end_env], np.zeros(num_envs, np.bool_)]),
        continues=np.concatenate([continues, open_continues]),
        num_finished=len(end_env),
    )
    return table.select(table.length > 0)


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
