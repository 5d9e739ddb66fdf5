"""ModuleStore: all observations and acts of one module's agents in one fragment, row by row.

Rows are appended in blocks, one per vector step. Agents remember row numbers only; columns are gathered once, when the
fragment is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlzmq.core.tree import tree_flatten, tree_map, value_kind
from rlzmq.episodes.columns import Columns
from rlzmq.runners.module_step import ModuleStep

__all__ = ["GrowingColumn", "ModuleStore", "gather_states"]

# Initial capacity of a column, in rows.
_FEWEST_ROWS = 64


class GrowingColumn:
    """A tree of arrays ``[rows, ...]`` with spare capacity, which grows by doubling.

    Args:
        example: A block, leaves ``[B, ...]``, that defines shapes and dtypes. A block of another dtype changes the
            column's dtype to the common one.
        capacity: Number of rows to make room for.
    """

    __slots__ = ("_array", "_capacity", "_leaves", "_row_shape", "_spec", "num_rows")

    def __init__(self, example: Any, capacity: int = 0) -> None:
        self._capacity = max(capacity, _FEWEST_ROWS)
        leaves, self._spec = tree_flatten(example)
        self._leaves = [np.empty((self._capacity, *np.shape(leaf)[1:]), leaf.dtype) for leaf in leaves]
        # The only leaf, if the column is an array.
        self._array: NDArray[Any] | None = self._leaves[0] if type(example) is np.ndarray else None
        self._row_shape = self._leaves[0].shape[1:] if self._leaves else ()
        self.num_rows: int = 0

    def put(self, block: Any, num_rows: int) -> bool:
        """Add a block of `num_rows` rows if it is an array like the column, and there is room for it."""
        array, begin = self._array, self.num_rows
        end = begin + num_rows
        if (
            array is None
            or type(block) is not np.ndarray
            or block.dtype is not array.dtype
            or len(block) != num_rows
            or block.shape[1:] != self._row_shape
            or end > self._capacity
        ):
            return False
        array[begin:end] = block
        self.num_rows = end
        return True

    def append(self, block: Any, num_rows: int) -> None:
        """Add a block of `num_rows` rows.

        Raises:
            ValueError: The block's structure or shapes differ from the column's.
        """
        begin, end = self.num_rows, self.num_rows + num_rows
        if end > self._capacity:
            self._grow(end)
        if isinstance(block, (dict, tuple)):
            leaves, spec = tree_flatten(block)
            if spec != self._spec:
                raise ValueError(f"expected items like {self._spec}, as in the steps before, got {spec}.")
        else:
            leaves = [block]
        columns = self._leaves
        if len(leaves) != len(columns):
            raise ValueError(f"expected items like {self._spec}, as in the steps before, got {block!r}.")
        for place, leaf in enumerate(leaves):
            column = columns[place]
            if leaf.shape != (num_rows, *column.shape[1:]):
                raise ValueError(
                    f"expected shape {(num_rows, *column.shape[1:])}, the first number being that of the "
                    f"agents, got {leaf.shape}."
                )
            if leaf.dtype != column.dtype:
                if value_kind(leaf.dtype) != value_kind(column.dtype):
                    raise ValueError(f"expected dtype {column.dtype}, got {leaf.dtype}.")
                dtype = np.result_type(column.dtype, leaf.dtype)
                columns[place] = column = column.astype(dtype, copy=False)
            column[begin:end] = leaf
        self.num_rows = end
        if self._array is not None:
            self._array = columns[0]

    def take(self, rows: NDArray[np.int64]) -> Any:
        """Return the given rows, leaves ``[*rows.shape, ...]``."""
        return self._spec.unflatten([leaf.take(rows, axis=0) for leaf in self._leaves])

    def _grow(self, num_rows: int) -> None:
        self._capacity = max(num_rows, 2 * self._capacity)
        for place, leaf in enumerate(self._leaves):
            larger = np.empty((self._capacity, *leaf.shape[1:]), leaf.dtype)
            larger[: self.num_rows] = leaf[: self.num_rows]
            self._leaves[place] = larger


class ModuleStore:
    """The rows of one module.

    Attributes:
        num_observations, num_acts: Number of rows so far.
        initial_block: The module's initial state as a tree of tensors ``[1, ...]``; None if stateless.
        templates: Names of the module's outputs so far -> zeros of one item.
    """

    def __init__(self, module_id: str, module_step: ModuleStep) -> None:
        self.module_id = module_id
        self.set_module_step(module_step)
        self.templates: dict[str, Any] = {}
        self.clear()

    def set_module_step(self, module_step: ModuleStep) -> None:
        """Use this module for all further actions."""
        self.module_step = module_step
        self.initial_block: Any = module_step.initial_state(1) if module_step.is_stateful else None

    def clear(self) -> None:
        """Drop all rows."""
        self._observations: GrowingColumn | None = None
        self._acts: dict[str, GrowingColumn] = {}
        self.num_observations: int = 0
        self.num_acts: int = 0

    def add_observations(self, block: Any, num_rows: int) -> None:
        """Append a block of observations, leaves ``[num_rows, ...]``."""
        if self._observations is None:
            self._observations = GrowingColumn(block)
        if not self._observations.put(block, num_rows):
            try:
                self._observations.append(block, num_rows)
            except ValueError as error:
                raise ValueError(f"Observations for module {self.module_id!r}: {error}") from error
        self.num_observations += num_rows

    def add_acts(self, num_rows: int, columns: dict[str, Any]) -> int:
        """Append a block of acts, leaves ``[num_rows, ...]``; return the index of its first row.

        Columns that are missing in some blocks (random actions before the module's first act) are filled with zeros
        there; a state is filled with the module's initial state.
        """
        acts, first = self._acts, self.num_acts
        for name, block in columns.items():
            column = acts.get(name)
            if column is not None and column.put(block, num_rows):
                continue
            if column is None:
                column = acts[name] = GrowingColumn(block, first + num_rows)
                if first:
                    column.append(self._missing(name, block, first), first)
            try:
                column.append(block, num_rows)
            except ValueError as error:
                raise ValueError(f"Column {name!r} of module {self.module_id!r}: {error}") from error
        if len(columns) != len(acts):
            for name in acts.keys() - columns.keys():
                example = acts[name].take(np.zeros(1, np.int64))
                acts[name].append(self._missing(name, example, num_rows), num_rows)
        self.num_acts = first + num_rows
        return first

    def _missing(self, name: str, example: Any, num_rows: int) -> Any:
        if name == Columns.STATE_OUT and self.module_step.is_stateful:
            row = self.module_step.initial_row_numpy
            return tree_map(lambda leaf: np.broadcast_to(leaf, (num_rows, *leaf.shape)), row)
        return tree_map(lambda leaf: np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), example)

    def remember_outputs(self, outputs: dict[str, Any]) -> None:
        """Store the structure of the module's outputs (leaves ``[B, ...]``), for steps in which it does not act."""
        if outputs.keys() - {Columns.ACTIONS} != self.templates.keys():
            for name, value in outputs.items():
                if name != Columns.ACTIONS:
                    self.templates.setdefault(name, tree_map(lambda leaf: np.zeros_like(leaf[0]), value))

    def observations(self, rows: Any) -> Any:
        """Return the observations in the given rows, leaves ``[*rows.shape, ...]``."""
        assert self._observations is not None
        return self._observations.take(np.asarray(rows, np.int64))

    def acts(self, rows: Any) -> dict[str, Any]:
        """Return all columns of the acts in the given rows, leaves ``[*rows.shape, ...]``."""
        index = np.asarray(rows, np.int64)
        return {name: column.take(index) for name, column in self._acts.items()}

    def act_column(self, name: str, rows: NDArray[np.int64]) -> Any:
        """Return one column of the acts in the given rows, leaves ``[*rows.shape, ...]``; None if it is missing."""
        column = self._acts.get(name)
        return None if column is None else column.take(rows)

    def keep(self, observation_rows: Any, act_rows: Any) -> None:
        """Drop all rows but these, which are renumbered from 0 in the given order."""
        observations = self.observations(observation_rows) if len(observation_rows) else None
        acts = self.acts(act_rows) if len(act_rows) else None
        self.clear()
        if observations is not None:
            self.add_observations(observations, len(observation_rows))
        if acts is not None:
            self.add_acts(len(act_rows), acts)


def gather_states(places: Sequence[tuple[Any, int, int]]) -> Any:
    """Return one block of states, leaves ``[len(places), ...]``, gathered from rows of other blocks.

    Args:
        places: (tree of tensors ``[B, ...]``, row in it, B). Agents that acted together share a block.
    """
    first, _, num_rows = places[0]
    if num_rows == len(places) and all(
        block is first and row == n for n, (block, row, _) in enumerate(places)
    ):
        return first
    blocks: dict[int, tuple[Any, int]] = {}  # id -> block, offset of its first row
    total = 0
    index = []
    for block, row, num_rows in places:
        known = blocks.get(id(block))
        if known is None:
            known = blocks[id(block)] = (block, total)
            total += num_rows
        index.append(known[1] + row)
    trees = [block for block, _ in blocks.values()]
    with torch.inference_mode():
        joined = trees[0] if len(trees) == 1 else tree_map(lambda *leaves: torch.cat(leaves), *trees)
        rows = torch.tensor(index)
        return tree_map(lambda leaf: leaf[rows], joined)
