"""Connector pieces on the fused path, which works on whole columns.

A pipeline of only default pieces and *columnar* pieces needs no per-episode dicts, so the env runner and the learner
work on whole arrays. This module documents the interface.

**Pieces.** A columnar piece sets ``columnar = True`` and implements
``transform_observations(observations, rows) -> observations``. Observations are trees of arrays ``[N, ...]``, one row
per observation. `rows` (`RowsContext`) tells which rows begin an episode, and gives access to the values before each
row. The same method serves the env runner (a row = one sub-env at this vector step) and the learner (a row = any slot
of an EpisodeBatch). There are two kinds:

* *writers* (``writes_episodes = True``: MeanStdFilter, FlattenObservations, PrevActionsPrevRewards): episodes store
  their result, so learners see it, too;
* *readers* (FrameStacking): their result goes to the module only.

**Env runner**, per vector step, for every row (including final observations and resets)::

    plan = env_to_module_pipeline.columnar_plan()      # None: use the generic path
    rows = VectorStepRows(columns, num_envs)           # columns: leaves [N, S, ...]; once
    # columns[ACTIONS], columns[REWARDS], ... already hold the step that led to `observations`
    rows.move_to(slot, is_first=..., num_previous=...)
    stored = plan.write(observations, rows)            # identity without writers
    columns[OBS][:, slot] = stored                     # space: plan.stored_observation_space
    module_observations = plan.read(stored, rows)      # identity without readers
    ...
    normalize = module_to_env_pipeline.columnar_plan().normalize
    actions_for_env = normalize.apply_vectorized(actions) if normalize else actions

A multi-agent env runner creates rows per agent (a row = this agent in one sub-env), for the agents with a new
observation at this vector step. ``rows.agent_id`` is the agent. An agent's steps before the row are its own steps, with
any number of env steps between them. Readers with ``agent_by_agent = False`` get the rows of all agents of a module at
once.

The runner keeps at least `plan.required_lookback` slots (multi-agent: of each agent's own steps) before each chunk.
`write` updates statistics (MeanStdFilter) exactly once per row: first with all N rows, then it normalizes. The
per-episode protocol does the same, so both paths give identical numbers.

**Learner**, on an EpisodeBatch::

    plan = learner_pipeline.columnar_plan()
    rows = FlatRows.of_batch(batch, slots, chunks)     # any slots: steps, bootstrap rows, next obs
    observations = plan.observations(batch, slots, chunks)   # gather + transforms, [M, ...]
    extra = plan.extra_columns(batch)                  # {column: [num_env_steps, ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlzmq.core.tree import tree_map
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["FlatRows", "RowsContext", "VectorStepRows"]

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class RowsContext(Protocol):
    """What a columnar piece knows about the N rows that it transforms.

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


class VectorStepRows:
    """Rows of an env runner: N sub-envs at one slot of their columns ``[N, S, ...]``.

    One object serves a whole run. Call `move_to` before every vector step.

    Args:
        columns: Column name -> tree of arrays ``[N, S, ...]``. It is looked up at every use, so entries may be
            replaced when a fragment begins.
        num_rows: N, the number of sub-envs.
        agent_id: The agent of these columns; None in single-agent use.
    """

    def __init__(self, columns: Mapping[str, Any], num_rows: int, agent_id: Any = None) -> None:
        self.columns = columns
        self.num_rows = num_rows
        self.agent_id = agent_id
        self.slot: int = 0
        self.is_first: BoolArray = np.ones(num_rows, np.bool_)
        self.num_previous: IntArray = np.zeros(num_rows, np.int64)

    def move_to(self, slot: int, *, is_first: BoolArray, num_previous: IntArray) -> None:
        """Set the slot of the current observations, and the facts about each row.

        Args:
            slot: Index into the second axis of the columns.
            is_first: bool[N].
            num_previous: int64[N], at most `slot` each. The arrays are kept, not copied.
        """
        self.slot = slot
        self.is_first = is_first
        self.num_previous = num_previous

    def window(self, column: str, num: int, *, current: bool) -> Any:
        """See `RowsContext.window`."""
        end = self.slot + int(current)
        begin = end - num
        missing = window_mask(self.num_previous, num, current=current)
        num_missing_slots = max(0, -begin)

        def cut(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if num_missing_slots == 0:
                part = leaf[:, begin:end]
                if missing is not None:
                    part = part.copy()
                    part[missing] = 0
                return part
            part = np.zeros((leaf.shape[0], num, *leaf.shape[2:]), leaf.dtype)
            part[:, num_missing_slots:] = leaf[:, :end]
            return part if missing is None else _zeroed(part, missing)

        return tree_map(cut, self.columns[column])


class FlatRows:
    """Rows at any slots of flat columns ``[num_slots, ...]``, e.g. of an EpisodeBatch.

    Args:
        columns: Column name -> tree of arrays ``[num_slots, ...]``.
        slots: int64[N], the slot of each row's observation.
        is_first: bool[N].
        num_previous: int64[N].
        agent_id: The agent of all rows; None in single-agent use.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        slots: IntArray,
        *,
        is_first: BoolArray,
        num_previous: IntArray,
        agent_id: Any = None,
    ) -> None:
        self.columns = columns
        self.slots = slots
        self.num_rows: int = len(slots)
        self.is_first = is_first
        self.num_previous = num_previous
        self.agent_id = agent_id

    @classmethod
    def of_batch(
        cls, batch: EpisodeBatch, slots: IntArray, chunks: IntArray, agent_id: Any = None
    ) -> FlatRows:
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

    def window(self, column: str, num: int, *, current: bool) -> Any:
        """See `RowsContext.window`."""
        offsets = np.arange(num, dtype=np.int64) - (num - int(current))
        missing = window_mask(self.num_previous, num, current=current)
        slots = self.slots[:, None] + offsets
        if missing is not None:
            slots = np.where(missing, 0, slots)

        def gather(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            part = leaf[slots]
            return part if missing is None else _zeroed(part, missing)

        return tree_map(gather, self.columns[column])


def window_mask(num_previous: IntArray, num: int, *, current: bool) -> BoolArray | None:
    """Return which entries ``[N, num]`` of a window are missing in the episode; None if there are none."""
    num_needed = num - int(current)
    if len(num_previous) == 0 or np.minimum.reduce(num_previous) >= num_needed:
        return None
    mask: BoolArray = np.arange(num_needed, -int(current), -1) > num_previous[:, None]
    return mask


def _zeroed(values: npt.NDArray[Any], mask: BoolArray) -> npt.NDArray[Any]:
    values[mask] = 0
    return values
