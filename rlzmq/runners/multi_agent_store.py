"""ModuleStore: all observations and acts of one module's agents in one fragment, row by row.

Rows are kept in the blocks in which they came (one per vector step). Agents remember only row numbers;
columns are gathered once, when the fragment is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlzmq.core.tree import tree_leaves, tree_map, tree_stack
from rlzmq.episodes.columns import Columns
from rlzmq.runners.module_step import ModuleStep

__all__ = ["ModuleStore", "gather_states"]


class ModuleStore:
    """The rows of one module.

    Args:
        module_id: The module's id.
        module_step: Runs the module on a block of observations.

    Attributes:
        num_observations, num_acts: Rows so far.
        initial_block: The module's initial state as a tree of tensors ``[1, ...]``; None if stateless.
        templates: Names of the outputs that the module gave so far -> zeros of one item.
    """

    def __init__(self, module_id: str, module_step: ModuleStep) -> None:
        self.module_id = module_id
        self.set_module_step(module_step)
        self.templates: dict[str, Any] = {}
        self.clear()

    def set_module_step(self, module_step: ModuleStep) -> None:
        """From now on this module acts."""
        self.module_step = module_step
        self.initial_block = module_step.initial_state(1) if module_step.is_stateful else None

    def clear(self) -> None:
        """Forgets all rows."""
        self._observations: list[Any] = []
        self._acts: list[tuple[int, dict[str, Any]]] = []
        self.num_observations = 0
        self.num_acts = 0

    def add_observations(self, items: Sequence[Any]) -> Any:
        """Stores one block of observations; returns it as a tree of arrays ``[B, ...]``."""
        block = tree_stack(items)
        self._observations.append(block)
        self.num_observations += len(items)
        return block

    def add_acts(self, num_rows: int, columns: dict[str, Any]) -> int:
        """Stores one block of acts, leaves ``[B, ...]``; returns the number of its first row."""
        first = self.num_acts
        self._acts.append((num_rows, columns))
        self.num_acts += num_rows
        return first

    def remember_outputs(self, outputs: dict[str, Any]) -> None:
        """Keeps the form of the module's outputs (leaves ``[B, ...]``), for steps in which it does not "
        "act."""
        if outputs.keys() - {Columns.ACTIONS} != self.templates.keys():
            for name, value in outputs.items():
                if name != Columns.ACTIONS:
                    self.templates.setdefault(name, tree_map(lambda leaf: np.zeros_like(leaf[0]), value))

    def observations(self, rows: Any) -> Any:
        """The observations in the given rows, leaves ``[len(rows), ...]``."""
        index = np.asarray(rows, np.int64)
        return tree_map(lambda leaf: leaf.take(index, axis=0), _concatenated(self._observations))

    def acts(self, rows: Any) -> dict[str, Any]:
        """All columns of the acts in the given rows, leaves ``[len(rows), ...]``.

        Blocks that lack a column (random actions before the module's first act) have zeros there, and the
        module's initial state for a state.
        """
        index = np.asarray(rows, np.int64)
        names: dict[str, Any] = {}
        for _, columns in self._acts:
            names.update(columns)
        gathered = {}
        for name, example in names.items():
            blocks = [
                columns[name] if name in columns else self._missing(name, example, num_rows)
                for num_rows, columns in self._acts
            ]
            gathered[name] = tree_map(lambda leaf: leaf.take(index, axis=0), _concatenated(blocks))
        return gathered

    def _missing(self, name: str, example: Any, num_rows: int) -> Any:
        if name == Columns.STATE_OUT and self.module_step.is_stateful:
            row = self.module_step.initial_row_numpy
            return tree_map(lambda leaf: np.broadcast_to(leaf, (num_rows, *leaf.shape)), row)
        return tree_map(lambda leaf: np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), example)

    def keep(self, observation_rows: Any, act_rows: Any) -> None:
        """Forgets all rows but these, which are numbered anew from 0 in the given order."""
        observations = self.observations(observation_rows) if len(observation_rows) else None
        acts = self.acts(act_rows) if len(act_rows) else None
        self.clear()
        if observations is not None:
            self._observations.append(observations)
            self.num_observations = len(observation_rows)
        if acts is not None:
            self.add_acts(len(act_rows), acts)


def gather_states(places: Sequence[tuple[Any, int]]) -> Any:
    """One block of states, leaves ``[len(places), ...]``, from rows of other blocks.

    Args:
        places: (tree of tensors ``[B, ...]``, row in it); agents that acted together share a block.
    """
    blocks: dict[int, tuple[Any, int]] = {}  # id -> block, number of rows before it
    total = 0
    index = []
    for block, row in places:
        known = blocks.get(id(block))
        if known is None:
            known = blocks[id(block)] = (block, total)
            total += len(tree_leaves(block)[0])
        index.append(known[1] + row)
    trees = [block for block, _ in blocks.values()]
    with torch.inference_mode():
        joined = trees[0] if len(trees) == 1 else tree_map(lambda *leaves: torch.cat(leaves), *trees)
        if index == list(range(total)):
            return joined
        rows = torch.tensor(index)
        return tree_map(lambda leaf: leaf[rows], joined)


def _concatenated(blocks: list[Any]) -> Any:
    if len(blocks) == 1:
        return blocks[0]
    if isinstance(blocks[0], np.ndarray):
        return np.concatenate(blocks)
    return tree_map(lambda *leaves: np.concatenate(leaves), *blocks)
