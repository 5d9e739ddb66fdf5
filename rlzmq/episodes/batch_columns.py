"""BatchColumns: the columns and the chunk table of an `EpisodeBatch`, and operations on chunk tables."""

from __future__ import annotations

import uuid
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_list import EpisodeList
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["ID_LISTS", "TABLE", "BatchColumns", "chosen_positions", "ragged_arange", "steps_window"]

# The parts of an EpisodeBatch's chunk table: arrays [C], and lists of C ids (or None).
TABLE = ("start", "length", "lookback", "t_started", "terminated", "truncated", "env_index")
ID_LISTS = ("episode_ids", "agent_ids", "module_ids", "multi_agent_episode_ids")

_BASE_COLUMNS = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)


def chosen_positions(chosen: Any, num: int) -> np.ndarray:
    """Convert positions (negative ones count from the end) or a bool mask to int64 positions in ``0 … num-1``.

    Raises:
        IndexError: A position does not exist or a mask has the wrong length.
    """
    chosen = np.asarray(chosen)
    if chosen.dtype != np.bool_:
        chosen = chosen.astype(np.int64, copy=False)
    positions: np.ndarray = np.arange(num, dtype=np.int64)[chosen]
    return positions


def ragged_arange(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``[starts[0], starts[0]+1, …, starts[1], starts[1]+1, …]``, with ``counts[i]`` numbers from each start.

    Args:
        starts: int64 [C].
        counts: int64 [C], from 0.

    Returns:
        int64 [counts.sum()].
    """
    if len(starts) == 1:
        start = int(starts[0])
        return np.arange(start, start + int(counts[0]), dtype=np.int64)
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if total == len(ends) and counts.all():
        return starts.astype(np.int64)
    numbers: np.ndarray = np.arange(total, dtype=np.int64)
    numbers += (starts - (ends - counts)).repeat(counts)
    return numbers


def steps_window(length: np.ndarray, begin: int, end: int) -> tuple[int, int, int, int]:
    """Return the chunks that contain the steps ``begin…end-1`` of all chunks in order, and the steps to cut off.

    Chunks without steps belong to the window that ends at (or begins before) their position. With ``begin == 0``,
    leading ones are included, too.

    Args:
        length: int64 [C], steps per chunk.
        begin, end: ``0 <= begin <= end <= length.sum()``.

    Returns:
        (first chunk, one past the last chunk, steps cut off the first one's front, steps cut off the last
        one's end).
    """
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    first = int(np.searchsorted(ends, begin, "right")) if begin else 0
    if end == total:
        stop = len(ends)
    elif end == 0:
        stop = 0
    else:
        # The chunk of step `end` is the first one that is not completely included; it may be included in part.
        stop = int(np.searchsorted(ends, end, "right"))
        if int(ends[stop] - length[stop]) < end:
            stop += 1
    stop = max(stop, first)
    if begin == end and begin not in (0, total):
        return first, first, 0, 0
    if first == stop:
        return first, stop, 0, 0
    front = max(0, begin - int(ends[first] - length[first]))
    back = max(0, int(ends[stop - 1]) - end)
    return first, stop, front, back


class BatchColumns(EpisodeList[SingleAgentEpisode]):
    """Data of an `EpisodeBatch`, whose docstring documents the arguments."""

    __slots__ = (
        "_tracked",
        "action_space",
        "agent_ids",
        "columns",
        "custom_data",
        "duration_s",
        "env_index",
        "episode_ids",
        "infos",
        "initial_state",
        "length",
        "lookback",
        "meta",
        "module_ids",
        "multi_agent_episode_ids",
        "observation_space",
        "start",
        "t_started",
        "terminated",
        "truncated",
    )

    def __init__(
        self,
        columns: dict[str, Any],
        *,
        start: Any,
        length: Any,
        lookback: Any = None,
        t_started: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        env_index: Any = None,
        episode_ids: list[str] | None = None,
        agent_ids: list[Any] | None = None,
        module_ids: list[Any] | None = None,
        multi_agent_episode_ids: list[Any] | None = None,
        initial_state: Any = None,
        infos: dict[int, dict[str, Any]] | None = None,
        custom_data: dict[int, dict[str, Any]] | None = None,
        duration_s: Any = None,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.columns: dict[str, Any] = columns
        self.start: NDArray[np.int64] = np.asarray(start, np.int64)
        num_chunks = len(self.start)

        def per_chunk(values: Any, dtype: Any, default: Any) -> np.ndarray:
            return np.full(num_chunks, default, dtype) if values is None else np.asarray(values, dtype)

        self.length: NDArray[np.int64] = per_chunk(length, np.int64, 0)
        self.lookback: NDArray[np.int64] = per_chunk(lookback, np.int64, 0)
        self.t_started: NDArray[np.int64] = per_chunk(t_started, np.int64, 0)
        self.terminated: NDArray[np.bool_] = per_chunk(terminated, np.bool_, False)
        self.truncated: NDArray[np.bool_] = per_chunk(truncated, np.bool_, False)
        self.env_index: NDArray[np.int64] = per_chunk(env_index, np.int64, -1)
        self.duration_s: NDArray[np.float64] | None = (
            None if duration_s is None else np.asarray(duration_s, np.float64)
        )
        self.episode_ids: list[str] = (
            [uuid.uuid4().hex for _ in range(num_chunks)] if episode_ids is None else episode_ids
        )
        self.agent_ids: list[Any] | None = agent_ids
        self.module_ids: list[Any] | None = module_ids
        self.multi_agent_episode_ids: list[Any] | None = multi_agent_episode_ids
        self.initial_state: Any = initial_state
        self.infos: dict[int, dict[str, Any]] = {} if infos is None else infos
        self.custom_data: dict[int, dict[str, Any]] = {} if custom_data is None else custom_data
        self.observation_space: gym.Space[Any] | None = observation_space
        self.action_space: gym.Space[Any] | None = action_space
        self.meta: dict[str, Any] = {} if meta is None else meta
        self._is_ordinary = False
        self._tracked: dict[int, SingleAgentEpisode] = {}
        of_chunks = (
            self.start, self.length, self.lookback, self.t_started, self.terminated, self.truncated,
            self.env_index, self.duration_s, self.episode_ids, agent_ids, module_ids, multi_agent_episode_ids,
        )  # fmt: skip
        given = [values for values in of_chunks if values is not None]
        if list(map(len, given)).count(num_chunks) != len(given):
            raise self._differing_lengths()

    def _differing_lengths(self) -> ValueError:
        num_chunks = len(self.start)
        name, num = next(
            (name, len(values))
            for name in (*TABLE, "duration_s", *ID_LISTS)
            if (values := getattr(self, name)) is not None and len(values) != num_chunks
        )
        return ValueError(f"EpisodeBatch.{name}: expected {num_chunks} values, one per chunk, got {num}.")

    # -- facts ----------------------------------------------------------------------------------------

    def _num_chunks(self) -> int:
        return len(self.start)

    @property
    def num_env_steps(self) -> int:
        """Number of steps in all chunks, without lookback parts."""
        if self._is_ordinary:
            return sum(map(len, self))
        length = self.length
        return int(length.item() if len(length) == 1 else length.sum())

    @property
    def num_slots(self) -> int:
        """First dimension of all columns."""
        leaves = tree_leaves(self.columns.get(Columns.OBS, ()))
        return len(leaves[0]) if leaves else 0

    @property
    def num_bytes(self) -> int:
        """Size of all columns in bytes."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.columns))

    @property
    def extra_names(self) -> list[str]:
        """Names of the extra model outputs among the columns."""
        return [name for name in self.columns if name not in _BASE_COLUMNS]

    def step_slots(self) -> np.ndarray:
        """Return the slot of every step, one chunk after the other, int64 [num_env_steps]."""
        return ragged_arange(self.start, self.length)

    def step_chunks(self) -> np.ndarray:
        """Return the chunk of every step in the order of `step_slots`, int64 [num_env_steps]."""
        return np.arange(len(self.start), dtype=np.int64).repeat(self.length)

    def get_returns(self) -> np.ndarray:
        """Return the sum of each chunk's rewards, without lookback parts, float64 [C]."""
        if (updated := self.updated()) is not self:
            return updated.get_returns()
        rewards = self.columns[Columns.REWARDS][self.step_slots()]
        return np.bincount(self.step_chunks(), weights=rewards, minlength=len(self))

    def __repr__(self) -> str:
        return (
            f"EpisodeBatch(chunks={len(self)}, env_steps={self.num_env_steps}, slots={self.num_slots}, "
            f"columns={list(self.columns)})"
        )

    def validate(self) -> None:
        """Check that every chunk is within the columns, and that all columns have the same number of slots.

        Raises:
            ValueError: A check failed; the text names the column or chunk, the expected and the actual bounds.
        """
        num_slots = self.num_slots
        for name in _BASE_COLUMNS:
            if name not in self.columns:
                raise ValueError(f"EpisodeBatch: expected a column {name!r}, got {list(self.columns)}.")
        for name, column in self.columns.items():
            for leaf in tree_leaves(column):
                if np.ndim(leaf) == 0 or len(leaf) != num_slots:
                    raise ValueError(
                        f"EpisodeBatch, column {name!r}: expected {num_slots} slots, got shape "
                        f"{np.shape(leaf)}."
                    )
        if len(self) == 0:
            return
        inside = (
            (self.length >= 0)
            & (self.length < num_slots)
            & (self.lookback >= 0)
            & (self.start < num_slots)
            & (self.start >= self.lookback)
            & (self.start < num_slots - self.length)
        )
        if not inside.all():
            c = int(np.argmin(inside))
            raise ValueError(
                f"EpisodeBatch, chunk {c}: expected slots within 0…{num_slots - 1}, got start "
                f"{self.start[c]}, length {self.length[c]}, lookback {self.lookback[c]}."
            )
        for leaf in tree_leaves(self.initial_state if self.initial_state is not None else ()):
            if len(leaf) != len(self):
                raise ValueError(
                    f"EpisodeBatch.initial_state: expected {len(self)} rows, got shape {np.shape(leaf)}."
                )

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in BatchColumns.__slots__ if name != "_tracked"}
