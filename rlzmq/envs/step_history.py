"""StepHistory: the actions of a vector env's environments, each since an earlier reset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.envs.env_state import MAX_REPLAYED_STEPS, History
from rlzmq.envs.rng_state import plain_random, random_state, set_random_state

__all__ = ["ActionHistory", "StepHistory"]

# Minimum number of steps between recorded resets, because reading the random state at every reset would slow
# short episodes by some percent.
_STEPS_BETWEEN_BEGINS = 256
# Actions are written into arrays for so many steps.
_STEPS_PER_BLOCK = 256


@dataclass(slots=True)
class ActionHistory(History):
    """An environment's reset, and its actions since then. An action after an episode's end is a reset.

    Attributes:
        step: Index of the vector step after the reset.
        seed, random: See `History`.
        actions: The actions since then, leaves ``[T, ...]``; None if T = 0. While the history is recorded, only those
            before `step`, if the environment itself was restored.
        due_in: Number of steps until `StepHistory.begin` must be called at a reset.
    """

    step: int
    seed: int | None
    random: dict[str, Any] | None
    actions: Any = None
    due_in: int = 0

    @staticmethod
    def get_random(env: Any) -> dict[str, Any] | None:
        """Return the random state of an environment; None if it has none."""
        return random_state(env)

    @staticmethod
    def set_random(env: Any, state: Mapping[str, Any] | None) -> None:
        """Set a random state from `get_random`."""
        set_random_state(env, state)

    def get_state(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "random": plain_random(self.random),
            "actions": self.actions,
            "due_in": self.due_in,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ActionHistory:
        return cls(0, state["seed"], state["random"], state["actions"], int(state["due_in"]))

    def replay(self, env: Any) -> Iterator[tuple[Any, bool]]:
        observation, _ = env.reset(seed=self.seed)
        is_over = False
        yield observation, is_over
        for action in _single_actions(env.action_space, self.actions):
            if is_over:
                observation, _ = env.reset()
                is_over = False
            else:
                observation, _, terminated, truncated, _ = env.step(action)
                is_over = bool(terminated or truncated)
            yield observation, is_over


def _single_actions(space: Any, actions: Any) -> Iterable[Any]:
    if actions is None:
        return ()
    if isinstance(actions, np.ndarray):
        return actions
    return iterate(batch_space(space, len(tree_leaves(actions)[0])), actions)


class StepHistory:
    """An earlier reset of each environment of a vector env, and the actions since then.

    Attributes:
        num_steps: Number of vector steps so far.
        due: For each environment, the number of steps after which `begin` must be called at a reset.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps: int = 0
        self.due: list[int] = [0] * num_envs
        self._begins: list[ActionHistory | None] = [None] * num_envs
        # Number of the first step, and actions ``[T, N, ...]`` of the steps from there on; in the last block up to
        # `num_steps`.
        self._blocks: deque[tuple[int, Any]] = deque()
        self._newest: Any = None  # the last block's array, if its actions are one
        self._row: int = 0  # the next step's, in the last block

    def record(self, actions: Any) -> None:
        """Record the actions of the vector step that is about to happen, a tree of arrays ``[N, ...]``."""
        newest, row = self._newest, self._row
        if (
            row < _STEPS_PER_BLOCK
            and type(actions) is np.ndarray
            and newest is not None
            and newest.dtype is actions.dtype
        ):
            newest[row] = actions
        else:
            self._record_slowly(tree_map(np.asarray, actions))
        self._row += 1
        self.num_steps += 1

    def _record_slowly(self, actions: Any) -> None:
        """Write nested actions; begin a block where the last one is full, or has actions of another dtype."""
        leaves = tree_leaves(actions)
        block = tree_leaves(self._blocks[-1][1]) if self._blocks else []
        if self._row >= _STEPS_PER_BLOCK or [a.dtype for a in block] != [a.dtype for a in leaves]:
            self._end_block()
            new = tree_map(lambda leaf: np.empty((_STEPS_PER_BLOCK, *leaf.shape), leaf.dtype), actions)
            self._blocks.append((self.num_steps, new))
            self._newest = new if type(new) is np.ndarray else None
            self._row = 0
            block = tree_leaves(new)
        for rows, leaf in zip(block, leaves, strict=True):
            rows[self._row] = leaf

    def _end_block(self) -> None:
        """Cut the last block to the steps in it, and drop those before all resets that can be replayed."""
        if self._blocks and self._row < _STEPS_PER_BLOCK:
            number, block = self._blocks.pop()
            self._blocks.append((number, tree_map(lambda leaf: leaf[: self._row], block)))
        oldest = self.num_steps - MAX_REPLAYED_STEPS
        needed = [b.step for b in self._begins if b is not None and b.step >= oldest]
        first_needed = min(needed, default=self.num_steps)
        while len(self._blocks) > 1 and self._blocks[1][0] <= first_needed:
            self._blocks.popleft()
        if self._blocks and self.num_steps <= first_needed:
            self._blocks.clear()

    def begin(self, index: int, env: Any, seed: int | None) -> None:
        """Record that environment `index` is about to be reset before step `num_steps`."""
        generator = getattr(env.unwrapped, "_np_random", None)
        random = None if generator is None else generator.bit_generator.state
        self._begins[index] = ActionHistory(self.num_steps, seed, random)
        self.due[index] = self.num_steps + _STEPS_BETWEEN_BEGINS

    def resume(self, index: int, history: ActionHistory | None) -> None:
        """Continue the history of restored environment `index`; None if its history is unknown."""
        due_in = 0
        if history is not None:
            history, due_in = replace(history, step=self.num_steps), history.due_in
        self._begins[index] = history
        self.due[index] = self.num_steps + due_in

    def restart(self, index: int, seed: int | None) -> None:
        """Record that environment `index` was replaced, and reset with `seed` in the current vector step."""
        self._begins[index] = None if seed is None else ActionHistory(self.num_steps, seed, None)
        self.due[index] = self.num_steps

    def history_of(self, index: int) -> ActionHistory | None:
        """Return a reset of environment `index` and all actions since; None if they are unknown or too many."""
        begin = self._begins[index]
        first = self._blocks[0][0] if self._blocks else self.num_steps
        if begin is None or begin.step < first:
            return None
        parts = [] if begin.actions is None else [begin.actions]
        ends = [*(number for number, _ in self._blocks), self.num_steps][1:]
        for (number, block), end in zip(self._blocks, ends, strict=True):
            rows = slice(max(0, begin.step - number), end - number)
            if rows.start < rows.stop:
                parts.append(tree_map(lambda leaf, rows=rows: leaf[rows, index], block))
        actions = tree_map(lambda *leaves: np.concatenate(leaves), *parts) if parts else None
        if actions is not None and len(tree_leaves(actions)[0]) > MAX_REPLAYED_STEPS:
            return None
        return replace(begin, actions=actions, due_in=max(0, self.due[index] - self.num_steps))
