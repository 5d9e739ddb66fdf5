"""Search for values that losses cannot use: NaN, infinity, and values whose square overflows float32.

A chunk with such a value in its observations, step columns, lookback or initial state is left out as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.columns import Columns, ragged_arange
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["LARGEST", "BadValue", "BadValues", "find_bad_values"]

# Losses and gradient norms square their inputs, and the square of a larger float32 overflows.
LARGEST = math.sqrt(float(np.finfo(np.float32).max))
_INITIAL_STATE = "initial_state"
_RANKS = {Columns.OBS: 0, Columns.REWARDS: 2}

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first unusable value of a chunk, in the order in which the values were produced.

    Attributes:
        column: The column's name and, in a tree, the path to the leaf.
        value: The unusable value.
        episode: Index of the episode's chunk in the batch.
        num_env_steps: Number of env steps of that episode when the value was produced.
        env_index: The sub-environment; -1: unknown.
        agent_id: The agent; None in single-agent use.
        is_of_env: Whether it is an observation or a reward; otherwise a module output.
    """

    column: str
    value: float
    episode: int
    num_env_steps: int
    env_index: int
    agent_id: Any
    is_of_env: bool

    def __str__(self) -> str:
        agent = "" if self.agent_id is None else f", agent {self.agent_id!r}"
        return (
            f"column {self.column} holds {self.value} at step {self.num_env_steps} of an episode "
            f"(env {self.env_index}{agent})"
        )


@dataclass(frozen=True, slots=True)
class BadValues:
    """Unusable values in a batch.

    Attributes:
        values: The first unusable value of each affected chunk.
        num: Number of unusable observations and rewards; if there are none, of steps with unusable module outputs.
    """

    values: list[BadValue]
    num: int

    def left_out_of(self, batch: EpisodeBatch) -> EpisodeBatch:
        """Return the batch without the chunks that hold these values."""
        keeps = np.ones(len(batch), np.bool_)
        keeps[[value.episode for value in self.values]] = False
        return batch.select(keeps).compact()


def find_bad_values(batch: EpisodeBatch) -> BadValues | None:
    """Return a batch's unusable values; None if there are none. Takes one pass over the columns.

    Lookback parts are included, since connectors read them.
    """
    values: list[BadValue] = []
    num_of_env = num_of_module = 0
    for part in batch.agent_batches:
        columns = dict(part.columns)
        if part.initial_state is not None:
            columns[_INITIAL_STATE] = part.initial_state
        for name, column in columns.items():
            leaves = (column,) if isinstance(column, np.ndarray) else tree_leaves(column)
            if not all(map(_all_usable, repeat(name), leaves)):
                marks = _marks(part, columns)
                values += _values_of(batch, part, marks)
                own = _num_bad(part, marks)
                num_of_env, num_of_module = num_of_env + own[0], num_of_module + own[1]
                break
    # Without `values`, all of them are in slots that belong to no chunk.
    return BadValues(values, num_of_env or num_of_module) if values else None


@dataclass(slots=True)
class _Leaf:
    """One array of a column with unusable values.

    Attributes:
        shown: Name and path, for display.
        usable: bool [num_slots].
        rank: Position in the order in which the values of one slot are produced: observation, model outputs, reward.
    """

    shown: str
    column: str
    array: NDArray[Any]
    usable: BoolArray
    rank: int


@dataclass(slots=True)
class _Marks:
    """The usable slots of a batch's columns, bool [num_slots], and its chunks' usable initial states, bool [C]."""

    observations: BoolArray
    steps: BoolArray
    initial_states: BoolArray
    leaves: list[_Leaf] = field(default_factory=list)


def _marks(batch: EpisodeBatch, columns: Mapping[str, Any]) -> _Marks:
    bad = [
        (name, path, leaf)
        for name, column in columns.items()
        for path, leaf in zip(*optree.tree_flatten_with_path(column)[:2], strict=True)
        if not _all_usable(name, leaf)
    ]
    ones = np.ones(batch.num_slots, np.bool_)
    marks = _Marks(ones, ones.copy(), np.ones(len(batch), np.bool_))
    for name, path, leaf in bad:
        usable: BoolArray = np.all(_usable(name, leaf).reshape(len(leaf), -1), axis=1)
        if name == _INITIAL_STATE:
            marks.initial_states &= usable
            continue
        if name == Columns.OBS:
            marks.observations &= usable
        else:
            marks.steps &= usable
        shown = f"{name!r}{''.join(f'[{key!r}]' for key in path)}"
        marks.leaves.append(_Leaf(shown, name, leaf, usable, _RANKS.get(name, 1)))
    return marks


def _all_usable(name: str, leaf: NDArray[Any]) -> bool:
    if leaf.dtype.kind not in "fc" or not leaf.size:
        return True
    if leaf.dtype.kind == "c":
        return bool(_usable(name, leaf).all())
    # NaN propagates through min and max, and compares False. (`leaf.max()` is a Python function around the reduction.)
    if not float(np.maximum.reduce(leaf, axis=None)) < LARGEST:
        return False
    return name == Columns.ACTION_DIST_INPUTS or float(np.minimum.reduce(leaf, axis=None)) > -LARGEST


def _usable(name: str, leaf: NDArray[Any]) -> BoolArray:
    """Return which values are usable. Logits of masked actions may be arbitrarily low."""
    sizes = leaf if name == Columns.ACTION_DIST_INPUTS else np.abs(leaf)
    # The range of float16 is smaller.
    usable: BoolArray = sizes < (LARGEST if leaf.dtype.itemsize > 2 else np.inf)
    return usable


def _first_of_chunks(batch: EpisodeBatch, marks: _Marks) -> list[tuple[int, str, float, int, int]]:
    """Return (chunk, column, value, env steps since the chunk's start, rank) of each chunk's first unusable value."""
    first: dict[int, tuple[int, int, _Leaf]] = {}
    for leaf in marks.leaves:
        counts = batch.lookback + batch.length + (leaf.rank == _RANKS[Columns.OBS])
        slots = ragged_arange(batch.start - batch.lookback, counts)
        bad = ~leaf.usable[slots]
        chunks = np.repeat(np.arange(len(batch)), counts)[bad]
        for c, slot in zip(chunks.tolist(), slots[bad].tolist(), strict=True):
            if c not in first or (slot, leaf.rank) < first[c][:2]:
                first[c] = slot, leaf.rank, leaf
    found = []
    for c, (slot, rank, leaf) in sorted(first.items()):
        row = np.atleast_1d(leaf.array[slot])
        value = float(np.real(row[~_usable(leaf.column, row)][0]))
        after = slot - int(batch.start[c]) + (rank == _RANKS[Columns.REWARDS])
        found.append((c, leaf.shown, value, after, rank))
    for c in np.flatnonzero(~marks.initial_states & (batch.length > 0)).tolist():
        if c not in first:
            found.append((c, repr(_INITIAL_STATE), math.nan, 0, 1))
    return found


def _num_bad(batch: EpisodeBatch, marks: _Marks) -> tuple[int, int]:
    """Return the numbers of unusable observations and rewards, and of steps with unusable columns."""
    slots = batch.step_slots()
    rewards = np.ones(batch.num_slots, np.bool_)
    for leaf in marks.leaves:
        if leaf.column == Columns.REWARDS:
            rewards &= leaf.usable
    observed = ragged_arange(batch.start, batch.length + 1)
    num_of_env = int((~marks.observations[observed]).sum() + (~rewards[slots]).sum())
    return num_of_env, int((~marks.steps[slots]).sum() + (~marks.initial_states).sum())


def _values_of(batch: EpisodeBatch, part: EpisodeBatch, marks: _Marks) -> Iterator[BadValue]:
    """Yield the first unusable value of each chunk of a part of the batch (itself, or a group of agents' chunks)."""
    for c, name, value, after, rank in _first_of_chunks(part, marks):
        e, num_env_steps = c, int(part.t_started[c]) + after
        if part.episode is not None:
            episode, _, env_ts = part.links
            e = int(episode[c])
            place = min(max(after, -int(part.lookback[c])), int(part.length[c]))
            num_env_steps = int(env_ts[int(part.start[c]) + place])
        agent_id = None if part.agent_ids is None or part is batch else part.agent_ids[c]
        yield BadValue(name, value, e, num_env_steps, int(batch.env_index[e]), agent_id, rank != 1)
