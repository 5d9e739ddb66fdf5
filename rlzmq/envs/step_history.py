"""StepHistory: the actions of a vector env's environments since an earlier reset of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rlzmq.core.tree import tree_leaves, tree_map, tree_stack
from rlzmq.envs.env_state import MAX_REPLAYED_STEPS, History
from rlzmq.envs.rng_state import plain_random, random_state, set_random_state

__all__ = ["ActionHistory", "StepHistory"]

# Minimum number of steps between recorded resets: reading the random state at every reset would slow
# short episodes by some percent.
_STEPS_BETWEEN_BEGINS = 256
# Actions are kept per step, and as one array for so many steps once there are so many.
_STEPS_PER_BLOCK = 256


@dataclass(slots=True)
class ActionHistory(History):
    """An environment's reset, and its actions since; an action after an episode's end is a reset.

    Attributes:
        step: Number of the vector step after the reset.
        seed, random: See `History`.
        actions: Actions since, leaves ``[T, ...]``; None where T = 0. While it is recorded, only those before `step`,
            if the environment was itself restored.
        due_in: In how many steps `StepHistory.begin` must be called at a reset.
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
        """Set a random state that `get_random` returned."""
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

    Args:
        num_envs: Number of environments.

    Attributes:
        num_steps: Vector steps so far.
        due: For each environment, the number of steps after which `begin` must be called at its resets.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps: int = 0
        self.due: list[int] = [0] * num_envs
        self._begins: list[ActionHistory | None] = [None] * num_envs
        # (number of the first step, actions ``[T, N, ...]``), then the actions ``[N, ...]`` of the steps after them
        self._blocks: deque[tuple[int, Any]] = deque()
        self._latest: list[Any] = []

    def record(self, actions: Any) -> None:
        """Record the actions of the vector step that is about to happen, a tree of arrays ``[N, ...]``."""
        self.num_steps += 1
        self._latest.append(actions.copy() if type(actions) is np.ndarray else tree_map(np.array, actions))
        if len(self._latest) == _STEPS_PER_BLOCK:
            self._blocks.append((self.num_steps - _STEPS_PER_BLOCK, tree_stack(self._latest)))
            self._latest = []
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop the actions before all resets that can be replayed."""
        oldest = self.num_steps - MAX_REPLAYED_STEPS
        needed = [b.step for b in self._begins if b is not None and b.step >= oldest]
        while self._blocks and self._blocks[0][0] + _STEPS_PER_BLOCK <= min(needed, default=self.num_steps):
            self._blocks.popleft()

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
        """Record that environment `index` was replaced and reset with `seed` in the current vector step."""
        self._begins[index] = None if seed is None else ActionHistory(self.num_steps, seed, None)
        self.due[index] = self.num_steps

    def history_of(self, index: int) -> ActionHistory | None:
        """Return a reset of environment `index`, and all actions since; None if they are unknown or too many."""
        begin = self._begins[index]
        first_latest = self.num_steps - len(self._latest)
        first = self._blocks[0][0] if self._blocks else first_latest
        if begin is None or begin.step < first:
            return None
        parts = [] if begin.actions is None else [begin.actions]
        for number, block in self._blocks:
            skipped = max(0, begin.step - number)
            if skipped < _STEPS_PER_BLOCK:
                parts.append(tree_map(lambda leaf, skipped=skipped: leaf[skipped:, index], block))
        latest = self._latest[max(0, begin.step - first_latest) :]
        if latest:
            parts.append(tree_map(lambda leaf: leaf[:, index], tree_stack(latest)))
        rows = tree_map(lambda *leaves: np.concatenate(leaves), *parts) if parts else None
        if rows is not None and len(tree_leaves(rows)[0]) > MAX_REPLAYED_STEPS:
            return None
        return replace(begin, actions=rows, due_in=max(0, self.due[index] - self.num_steps))
