"""Rows: what connector pieces work on, whole columns instead of one episode after the other.

A piece is a function of rows: next to `__call__`, which RLlib's pieces have, it states its row form. A pipeline whose
pieces all have one, in the order of their `stage`, runs on rows (``pipeline.on_rows``). A piece without one, such as a
user's that has only `__call__`, makes its pipeline call all its pieces with real episodes. Both give identical numbers.
A subclass that overrides only `__call__` has no row form. `ObservationPiece` makes the form for episodes from the one
for rows: writers such as MeanStdFilter are written once.

**Observations.** ``transform_observations(observations, rows) -> observations`` gets trees of arrays ``[N, ...]``, one
row per observation. `rows` (`RowsContext`) tells which rows begin an episode, and gives access to the values before
each row. The same method serves the env runner (a row = one sub-env at this vector step) and the learner (a row = any
slot of an EpisodeBatch). There are two kinds:

* *writers* (``writes_episodes = True``: MeanStdFilter, FlattenObservations, PrevActionsPrevRewards): episodes store
  their result, so learners see it, too;
* *readers* (FrameStacking): their result goes to the module only.

**Env runner**, per vector step, for every row (including final observations and resets)::

    rows = ColumnRows(columns, slot, is_first=..., num_previous=...)    # columns: leaves [N, S, ...]; once
    # columns[ACTIONS], columns[REWARDS], ... already hold the step that led to `observations`
    rows.move_to(slot, is_first=..., num_previous=...)
    stored = env_to_module.write(observations, rows)   # identity without writers
    columns[OBS][:, slot] = stored                     # space: env_to_module.stored_observation_space
    module_observations = env_to_module.read(stored, rows)   # identity without readers

A multi-agent env runner creates rows per agent (a row = this agent in one sub-env), for the agents with a new
observation at this vector step. ``rows.agent_id`` is the agent. An agent's steps before the row are its own steps, with
any number of env steps between them. Readers with ``agent_by_agent = False`` get the rows of all agents of a module at
once.

The runner keeps at least `required_lookback` slots (multi-agent: of each agent's own steps) before each chunk. `write`
updates statistics (MeanStdFilter) exactly once per row: first with all N rows, then it normalizes.

**Learner.** ``piece.train_rows(rows)`` adds the piece's columns to `TrainRows`, a train batch under construction.
The default is enough for pieces that transform observations or ``compute_columns(episodes)``, one value per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from rlzmq.core.tree import tree_map, tree_rows
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

if TYPE_CHECKING:
    import torch

__all__ = ["ColumnRows", "RowsContext", "TrainRows"]

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class RowsContext(Protocol):
    """What a piece knows about the N rows that it transforms.

    Attributes:
        num_rows: N.
        is_first: bool[N], whether the row's observation is its episode's first (a reset observation).
        num_previous: int64[N], number of readable steps of the same episode before the row (chunk and lookback); 0
            for an episode's first observation.
        agent_id: The agent of all rows; None in single-agent use, or if the rows belong to several agents.
    """

    num_rows: int
    is_first: BoolArray
    num_previous: IntArray
    agent_id: Any

    def window(self, column: str, num: int, *, current: bool) -> Any:
        """Return the last `num` values of a column before (or up to) each row.

        Args:
            column: A column name, e.g. ``Columns.OBS`` or ``Columns.REWARDS``.
            num: Length of the window, >= 1.
            current: Whether the window ends with the row's own slot (for observations, once they are stored) instead
                of the slot before it (for actions, rewards).

        Returns:
            A tree of arrays ``[N, num, ...]``, oldest first; zeros where the episode has no value.
        """
        ...


class ColumnRows:
    """Rows at slots of columns: of an EpisodeBatch, ``[num_slots, ...]``, or of N sub-envs, ``[N, S, ...]``.

    Args:
        columns: Column name -> tree of arrays.
        slots: int64[N], each row's slot. Of sub-envs, the one slot of all N rows, which `move_to` changes.
        is_first: bool[N].
        num_previous: int64[N]. All `num_previous` slots before a row belong to its episode.
        agent_id: The agent of these rows; None in single-agent use.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        slots: IntArray | int,
        *,
        is_first: BoolArray,
        num_previous: IntArray,
        agent_id: Hashable = None,
    ) -> None:
        self.columns = columns
        self.num_rows: int = len(is_first)
        self.agent_id = agent_id
        self.move_to(slots, is_first=is_first, num_previous=num_previous)

    @classmethod
    def of_batch(
        cls, batch: EpisodeBatch, slots: IntArray, chunks: IntArray, agent_id: Hashable = None
    ) -> ColumnRows:
        """Return rows of an EpisodeBatch.

        Args:
            batch: The chunks.
            slots: int64[N], slots within ``start - lookback … start + length`` of their chunk.
            chunks: int64[N], index of each slot's chunk.
            agent_id: The agent of all rows; None in single-agent use.
        """
        step = slots - batch.start[chunks]
        return cls(
            batch.columns,
            slots,
            is_first=batch.t_started[chunks] + step == 0,
            num_previous=step + batch.lookback[chunks],
            agent_id=agent_id,
        )

    def move_to(self, slots: IntArray | int, *, is_first: BoolArray, num_previous: IntArray) -> None:
        """Set the slots of the current observations, and the facts about each row; see the class."""
        self.slots, self.is_first, self.num_previous = slots, is_first, num_previous

    def window(self, column: str, num: int, *, current: bool) -> Any:
        """See `RowsContext.window`."""
        missing = window_mask(self.num_previous, num, current=current)
        places: Any
        if isinstance(self.slots, int) and missing is None:
            end = self.slots + int(current)
            places = slice(None), slice(end - num, end)
        else:
            slots = np.add.outer(self.slots, np.arange(num) - (num - int(current)))
            slots = slots if missing is None else np.where(missing, 0, slots)
            places = (np.arange(self.num_rows)[:, None], slots) if isinstance(self.slots, int) else slots

        def gather(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            part: npt.NDArray[Any] = leaf[places]
            if missing is not None:
                part[missing] = 0
            return part

        return tree_map(gather, self.columns[column])


class _ObservationPiece(Protocol):
    agent_by_agent: ClassVar[bool]

    def transform_observations(self, observations: Any, rows: RowsContext) -> Any: ...


class TrainRows:
    """One module's train batch while the pieces of a learner pipeline make it.

    A row is a step. Pieces that need a row for each chunk's last observation call `lay_out` first.

    Args:
        episodes: The chunks, each with at least one step.
        module: The RLModule.
        module_id: Its id.
        device: The module's device.
        keeps_forward: Whether the outputs of `forward_train` may become a column, for one update with these weights.

    Attributes:
        columns: Name -> tree of arrays ``[N, ...]``, or of tensors ``[B, ...]`` on the CPU in the end.
        observation_pieces: Pieces that all observations go through, in order.
        lengths: int64[C], number of rows of each chunk.
        chunks: int64[N], chunk of each row.
        observations: int64[N], slot of each row's observation.
        steps: int64[N], slot of each row's step; an extra row repeats its chunk's last step.
        extra: int64[C], the extra rows; empty unless `lay_out` made some.
        last: int64[C], row of each chunk's last step.
        is_real: bool[N], whether each row is a step, not an extra row.
    """

    def __init__(
        self,
        episodes: EpisodeBatch,
        module: Any,
        module_id: str,
        device: torch.device,
        *,
        keeps_forward: bool = False,
    ) -> None:
        self.episodes = episodes
        self.module = module
        self.module_id = module_id
        self.device = device
        self.keeps_forward = keeps_forward
        self.columns: dict[str, Any] = {}
        self.observation_pieces: list[_ObservationPiece] = []
        self.lay_out(0)

    def lay_out(self, num_extra: int) -> None:
        """Give each chunk so many extra rows (0, or 1 for its last observation). Call it before there are columns."""
        episodes = self.episodes
        self.lengths: IntArray = episodes.length + num_extra
        self.chunks: IntArray = np.arange(len(episodes), dtype=np.int64).repeat(self.lengths)
        self.observations: IntArray = ragged_arange(episodes.start, self.lengths)
        ends = self.lengths.cumsum()
        self.extra: IntArray = ends - 1 if num_extra else ends[:0]
        self.last: IntArray = ends - 1 - num_extra
        self.steps: IntArray = self.observations.copy()
        self.steps[self.extra] -= 1
        self.is_real: BoolArray = np.ones(len(self.steps), np.bool_)
        self.is_real[self.extra] = False

    def __len__(self) -> int:
        return len(self.steps)

    def at_ends(self, flags: BoolArray) -> BoolArray:
        """Return bool[N]: the chunks' `flags` at their last steps, False elsewhere."""
        column = np.zeros(len(self), np.bool_)
        column[self.last] = flags
        return column

    def add_step_columns(self, columns: Mapping[str, Any]) -> None:
        """Add columns with a value per step, ``[num_steps, ...]``; extra rows get zeros."""
        for name, values in columns.items():
            self.columns[name] = tree_map(self._spread, values) if len(self.extra) else values

    def _spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        spread = np.zeros((len(self), *values.shape[1:]), values.dtype)
        spread[self.is_real] = values
        return spread

    def observations_at(self, slots: IntArray) -> Any:
        """Return the module's observations ``[N, ...]`` at one slot for each row, of the row's chunk.

        Args:
            slots: int64[N], within ``start - lookback … start + length`` of their chunks.
        """
        batch, chunks = self.episodes, self.chunks
        if not self.observation_pieces:
            return tree_rows(batch.columns[Columns.OBS], slots)
        agent_ids = list(dict.fromkeys(batch.agent_ids or [None]))
        if len(agent_ids) == 1:
            return self._transformed(slots, chunks, agent_ids[0])
        if not any(piece.agent_by_agent for piece in self.observation_pieces):
            return self._transformed(slots, chunks, None)
        agent_of = np.array([agent_ids.index(agent_id) for agent_id in batch.agent_ids or ()])[chunks]
        order = np.argsort(agent_of, kind="stable")
        parts = [
            self._transformed(slots[mine], chunks[mine], agent_ids[agent_of[mine[0]]])
            for mine in np.split(order, np.flatnonzero(np.diff(agent_of[order])) + 1)
            if len(mine)
        ]
        back = np.argsort(order)
        return tree_map(lambda *leaves: np.concatenate(leaves)[back], *parts)

    def _transformed(self, slots: IntArray, chunks: IntArray, agent_id: object) -> object:
        rows = ColumnRows.of_batch(self.episodes, slots, chunks, agent_id)
        observations = tree_rows(self.episodes.columns[Columns.OBS], slots)
        for piece in self.observation_pieces:
            observations = piece.transform_observations(observations, rows)
        return observations


def window_mask(num_previous: IntArray, num: int, *, current: bool) -> BoolArray | None:
    """Return which entries ``[N, num]`` of a window are missing in the episode; None if there are none."""
    num_needed = num - int(current)
    if len(num_previous) == 0 or np.minimum.reduce(num_previous) >= num_needed:
        return None
    mask: BoolArray = np.arange(num_needed, -int(current), -1) > num_previous[:, None]
    return mask
